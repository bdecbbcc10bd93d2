"""What is kept: journals, and who owns them. One method is one transaction."""
