"""From a path, a hub name or an object to a model that can be decoded."""
