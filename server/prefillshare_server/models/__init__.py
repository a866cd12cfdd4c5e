"""Models on disk: the store, geometry, and the prompt layout. Importing it is cheap."""
