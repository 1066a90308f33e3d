"""What paging is worth: the workloads of the PagedAttention paper, paged and reserved contiguously."""
