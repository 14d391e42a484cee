"""Names and forms of Opacus."""
