"""What producers and workers agree on: the schema, the Redis keys, the job's wire form, errors, connections."""
