"""A budget, a private run and a table of results, from Python. Run: python examples/quickstart.py

The commands `dpfp calibrate`, `dpfp train` and `dpfp results` call the same functions.
"""

from dpfp_ray import Plan, calibrate, load_results, train

# Leave out max_train and max_dev for all 9,568 training records of the demo.
plan = Plan(task="demo", method="dpfp", mode="moments", epsilon=3, max_train=1000, max_dev=200)

# How much noise does the budget ask for? This needs no data, only the number of records.
print(f"σ = {calibrate(plan, records=1000).sigma:.3f}")

# One run. Called again with the same output, it continues what was stopped and repeats nothing.
run = train(plan, output="runs/quickstart")
print(f"accuracy {run.accuracy:.3f} at ε = {run.epsilon:.2f}")
print(run.statement)

# All results below a folder, as a pandas DataFrame.
print(load_results("runs")[["method", "mode", "epsilon", "guarantee", "accuracy"]])
