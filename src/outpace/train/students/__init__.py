"""What is trained, and what it needs beside its network."""
