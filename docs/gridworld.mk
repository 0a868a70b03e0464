# Drama's grid-world table (Wang et al. 2024, table 2), beside the paper's (docs/results/grid-world.md).
#   make -f docs/gridworld.mk                      run it alone, because it times training steps
#   make -f docs/gridworld.mk SEEDS="1 2 3"        adds intervals
R := runs/gridworld
BACKBONES := mamba2 mamba1 gru transformer-xl
LENGTHS := gridworld gridworld-long
SEEDS := 1
RUNS := $(foreach length,$(LENGTHS),$(foreach backbone,$(BACKBONES),$(foreach seed,$(SEEDS),$(R)/$(length)-$(backbone)-$(seed))))

table: $(RUNS:=/evaluation/latest/manifest.json) ; wm compare --protocol gridworld $(RUNS)
.PHONY: table
.NOTPARALLEL:

define one
$(R)/$(1)-$(2)-$(3)/evaluation/latest/manifest.json: ; wm run $(1) --backbone $(2) --seed $(3) --run $(R)/$(1)-$(2)-$(3) && wm eval --protocol gridworld --run $(R)/$(1)-$(2)-$(3)
endef
$(foreach length,$(LENGTHS),$(foreach backbone,$(BACKBONES),$(foreach seed,$(SEEDS),$(eval $(call one,$(length),$(backbone),$(seed))))))
