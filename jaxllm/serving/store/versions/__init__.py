"""What each version of the tables changes, in Alembic's form. One that was released stays: a change is a new file."""
