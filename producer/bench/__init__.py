"""`headrace bench`: workloads, measuring through Redis, reporting and plotting. Torch runs in processes of its own."""
