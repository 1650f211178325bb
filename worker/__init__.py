"""The worker: takes many jobs from Redis at once, decodes them as one batch, and writes each back as it finishes."""
