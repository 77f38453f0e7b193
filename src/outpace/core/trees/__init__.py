"""Draft trees and their shapes."""
