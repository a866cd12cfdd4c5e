"""The paper's evaluation: its workloads, its systems and their baselines, measured and reported."""
