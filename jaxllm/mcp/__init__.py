"""Tool servers that speak the Model Context Protocol: started, listed, called and stopped."""
