"""The trainings that are compared: one script per tool, which takes a `Job` as JSON."""
