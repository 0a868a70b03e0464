# Returns with attention priors, with and without the error of the paper's public code (docs/results/priors.md).
#   make -j2 -f docs/priors.mk        prints the table and draws the learned priors; SEEDS="1 2 3 4 5" for more
# Each run uses one thread: choose -j by the number of cores.
R := runs/priors
SEEDS := 1 2 3
PRIOR := backbone.prior

none :=
gaussian := $(PRIOR).kind=gaussian
span := $(PRIOR).kind=span $(PRIOR).regularizer=l1
combined := $(PRIOR).kind=gaussian_span $(PRIOR).span=10 $(PRIOR).regularizer=l1
# The public code multiplies scores, has triangular spans, and its spans let training read the future ...
GAUSSIAN := $(PRIOR).form=scale $(PRIOR).mean_bound=clamp
SPAN := $(PRIOR).form=scale $(PRIOR).span_mask=triangle
reference-gaussian := $(gaussian) $(GAUSSIAN)
reference-span := $(span) $(SPAN) $(PRIOR).leak=true
reference-combined := $(combined) $(GAUSSIAN) $(SPAN) $(PRIOR).leak=true
# ... and the same without that leak.
sealed-span := $(span) $(SPAN)
sealed-combined := $(combined) $(GAUSSIAN) $(SPAN)
LEARNED := gaussian span combined reference-gaussian reference-span reference-combined sealed-span sealed-combined
VARIANTS := none $(LEARNED)

runs = $(foreach seed,$(SEEDS),$(R)/$(1)-$(seed))
RUNS := $(foreach variant,$(VARIANTS),$(call runs,$(variant)))

table: $(RUNS:=/evaluation/latest/manifest.json) $(foreach variant,$(LEARNED),$(R)/$(variant).png)
	wm compare $(RUNS) --by $(PRIOR).kind --by $(PRIOR).form --by $(PRIOR).leak
.PHONY: table

define one
$(R)/$(1)-$(2)/evaluation/latest/manifest.json:
	wm run priors-study --run $(R)/$(1)-$(2) --seed $(2) --set training.threads=1 $(foreach each,$($(1)),--set $(each))
endef
define picture
$(R)/$(1).png: $(addsuffix /evaluation/latest/manifest.json,$(call runs,$(1)))
	wm compare $(call runs,$(1)) --priors $$@ > /dev/null
endef
$(foreach variant,$(VARIANTS),$(foreach seed,$(SEEDS),$(eval $(call one,$(variant),$(seed)))))
$(foreach variant,$(LEARNED),$(eval $(call picture,$(variant))))
