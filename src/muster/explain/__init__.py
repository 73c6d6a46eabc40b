"""From the logs of a job to what happened in it: lines, events, then the picture and diagnoses."""
