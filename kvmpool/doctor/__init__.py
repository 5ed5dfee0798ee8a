"""The checks behind `kvmpool doctor`: each a function that looks and answers PASS, WARN or FAIL with its remedy."""
