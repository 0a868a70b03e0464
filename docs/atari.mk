# Returns of the Atari presets on two CPU cores (docs/atari.md). Each run takes a quarter of an hour to an hour.
#   make -j2 -f docs/atari.mk        every preset on the six games that settings were chosen on
#   make -j2 -f docs/atari.mk PRESETS=drama-atari GAMES="Boxing CrazyClimber" SEEDS="2 3"   further seeds of one preset
#   make -j2 -f docs/atari.mk PRESETS=drama-atari SET="dynamics.reward_weight=1" R=runs/ablation   a change, kept apart
# Each run uses one thread: choose -j by the number of cores. The same command resumes what was stopped.
# docs/atari_scores.py adds finished runs to the tables and curves of docs/atari.md: its head shows how.
# Evaluations on the way leave files as the last one does, so make asks `wm run` what is done.
R := runs/atari
PRESETS := drama-atari storm-atari dreamer-atari rem-atari unizero-atari muzero-atari wm-best
GAMES := Boxing CrazyClimber RoadRunner Freeway Breakout Pong
SEEDS := 1
SET :=

runs = $(foreach game,$(GAMES),$(foreach seed,$(SEEDS),$(R)/$(1)-$(game)-$(seed)))

all: $(addprefix table-,$(PRESETS))
.PHONY: all $(addprefix table-,$(PRESETS)) $(foreach preset,$(PRESETS),$(call runs,$(preset)))

define table
table-$(1): $(call runs,$(1))
	wm compare $(call runs,$(1))
endef
define one
$(R)/$(1)-$(2)-$(3):
	wm run $(1) --run $(R)/$(1)-$(2)-$(3) --seed $(3) --set training.threads=1 --set environment.id=ALE/$(2)-v5 $(foreach each,$(SET),--set $(each))
endef
$(foreach preset,$(PRESETS),$(eval $(call table,$(preset))))
$(foreach preset,$(PRESETS),$(foreach game,$(GAMES),$(foreach seed,$(SEEDS),$(eval $(call one,$(preset),$(game),$(seed))))))
