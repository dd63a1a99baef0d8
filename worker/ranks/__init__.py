"""One model divided among the ranks of a group: what each of them has, and where their results are summed up."""
