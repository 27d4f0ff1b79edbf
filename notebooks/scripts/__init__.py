"""Scripts that readers launch, and that lessons show and import."""
