"""Scripts of the compared trainings: one script per tool, which takes a `Job` as JSON."""
