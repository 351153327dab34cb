"""Pages that have lost their place on the devices, in host memory and on disk, until their prefix comes again."""
