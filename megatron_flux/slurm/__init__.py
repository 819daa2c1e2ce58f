"""Jobs on clusters: profiles, job scripts, submission, collection and prediction. Knows the commands only by name."""
