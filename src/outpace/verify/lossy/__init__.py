"""Rules that may change the text; used only where the user names one."""
