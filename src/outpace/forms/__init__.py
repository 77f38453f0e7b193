"""Texts of a given form: JSON schemas, regular expressions, choices and grammars."""
