# %% [markdown]
# # The whole story in a notebook
#
# A search, its pictures, a comparison at equal ε, an audit, and what all of it has cost the people in the data.
# Three minutes on two CPU cores. Everything can be run again: finished runs are read, not repeated.

# %%
import warnings
from pathlib import Path

from dpfp_ray import Plan, audit, calibrate, compare, ledger, load_results, sweep, train

warnings.filterwarnings("ignore")
out = Path("runs/story")
few = {"task": "demo", "max_train": 2500, "max_dev": 500, "delta": 1e-5}  # of 9,568 and 1,000

# %% [markdown]
# How much noise does a budget ask for? That needs no data, only the number of records.

# %%
plan = Plan(**few, method="dpfp", mode="moments", epsilon=3)
{epsilon: calibrate(Plan(**few, mode="moments", epsilon=epsilon), records=2500).sigma for epsilon in (1, 3, 8)}

# %% [markdown]
# **A search** of DP-FP on a frozen encoder, by Optuna's TPE: every setting gets the noise that ε = 3 asks for.

# %%
swept = sweep("demo", samples=12, changes={"max_train": 2500, "max_dev": 500}, storage=out / "sweep", ledger=out / "ledger")
print(swept.outcome.headline)

# %%
from optuna.visualization.matplotlib import plot_optimization_history, plot_param_importances

study = swept.to_optuna()
plot_optimization_history(study)

# %%
plot_param_importances(study)

# %% [markdown]
# **A comparison at equal ε**, three seeds each. The last line says what is more than noise.

# %%
table = compare(
    methods=["non_private:head", "dpfp:moments", "objpert"],
    epsilon=[1, 3], seeds=3, output=out / "compare", ledger=out / "ledger", **few,
)
print(table.compared.headline)
frame = table.to_pandas()
frame[["method", "epsilon", "accuracy", "guarantee"]]

# %%
private = load_results(out / "compare").query("method != 'non_private'")
scores = private.groupby(["epsilon", "method"])["accuracy"].mean().unstack()
scores.plot(marker="o", xlabel="ε", ylabel="dev accuracy", logx=True, xticks=[1, 3])

# %% [markdown]
# **One model to keep**, and what it promises.

# %%
run = train(plan, output=out / "one", ledger=out / "ledger", reporter="silent")
print(run.statement)
run.model.predict(["a moving, beautiful film", "dull and far too long"])

# %% [markdown]
# **An audit** of the paper's DP-FP, whose ε is only nominal: the encoder trains on raw records.

# %%
paper = Plan(**{**few, "max_train": 600, "max_dev": 200}, method="dpfp", epsilon=3, learning_rate=2e-4, epochs=2)
audited = audit(paper, canaries=300, output=out / "audit", ledger=out / "ledger", reporter="silent")
f"stated ε = 3, measured ε ≥ {audited.epsilon_at_least:.2f}: {audited.outcome}"

# %% [markdown]
# **The ledger**: one number for the people in the data.

# %%
print(ledger(out / "ledger").spent.headline())
