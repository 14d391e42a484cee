"""How fast the package is, and how much memory it takes, against torch and other packages."""
