"""What only the project needs. `lab/README.md` says what is here and how to run it."""
