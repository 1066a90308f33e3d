"""What paging is worth in memory: the workloads of the PagedAttention paper, paged and reserved contiguously."""
