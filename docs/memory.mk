# Memory of backbones: tables 2 and 3 of S4WM (Deng, Park and Ahn 2023) at a size for CPUs (docs/results/memory.md).
#   make -j2 -f docs/memory.mk        prints both tables and door accuracy; SEEDS="1 2 3" adds intervals
#   make -j2 -f docs/memory.mk TASKS=memory-small WIDTH=20        a longer hallway
#   make -j2 -f docs/memory.mk TASKS=memory-small MODELS="s4 no-mlp full-posterior s4d s5 tssm-xl cache-8 cache-4"
#                                     S4WM's variants and shorter caches: tables 4 and 5
#   make -j2 -f docs/memory.mk TASKS=rooms-small MODELS="s4 tssm-xl mamba2"        two rooms and their recall
#   make -j2 -f docs/memory.mk TASKS=memory-small MODELS="s5 retnet gaussian" R=runs/longer SET=dynamics.updates=4000
#                                     other settings, in another folder
#   wm compare runs/memory-12/rooms-small-* --protocol recall --curves recall.png        the same as a picture
#   wm compare runs/memory-12/rooms-small-* --protocol generation --strips rooms.png     imagination below the real frames
#   wm compare runs/memory-12/rooms-small-* --protocol recall --strips recall-strip.png  the same behind the teleport
#   wm compare runs/memory-12/doors-small-* --protocol doors --strips doors-strip.png    outcomes at the doors
# All models have the same parameter count within 8 %. Each run uses one thread: choose -j by the number of cores.
WIDTH := 12
R := runs/memory-$(WIDTH)
SEEDS := 1
TASKS := memory-small doors-small
MODELS := s4 s4d s5 mamba2 mamba1 retnet transformer gaussian tssm-xl rssm
SET :=

s4 :=
s4d := backbone.kind=s4d
s5 := backbone.kind=s5 backbone.width=60 backbone.state_size=64 backbone.blocks=1
mamba2 := backbone.kind=mamba2 backbone.width=92 backbone.head_width=8
mamba1 := backbone.kind=mamba1 backbone.width=88
retnet := backbone.kind=retnet backbone.width=68 backbone.heads=2
transformer := backbone.kind=transformer backbone.width=68
gaussian := $(transformer) backbone.prior.kind=gaussian
# As the paper-size presets on the shortest hallway: a cache of half an episode, gradients through a fifth of one. More
# updates make up for the smaller number of frames in a batch.
tssm-xl := backbone.kind=transformer-xl backbone.width=68 backbone.heads=4 backbone.ffn=4
rssm := backbone.kind=dreamer-gru backbone.width=112 backbone.layers=1 dynamics.posterior=recurrent \
	dynamics.rows=streams dynamics.context=3 dynamics.validate_every=1250
# S4WM's variants and shorter caches; these differ in size.
no-mlp := backbone.ffn=0
full-posterior := dynamics.posterior=full
cache-8 := $(tssm-xl) backbone.memory_length=8 backbone.segment_length=8
cache-4 := $(tssm-xl) backbone.memory_length=4 backbone.segment_length=4

FRAMES := $(shell expr $(WIDTH) '*' 5 / 2)
HALF := $(shell expr $(FRAMES) / 2)
memory-small := environment.id=wm/DistractingMemory-$(WIDTH)-v0
memory-small-tssm-xl := backbone.memory_length=$(HALF) backbone.segment_length=$(HALF)
doors-small-tssm-xl := backbone.memory_length=70 backbone.segment_length=70
rooms-small-s5 := backbone.width=124
rooms-small-mamba2 := backbone.width=168
rooms-small-mamba1 := backbone.width=164
rooms-small-retnet := backbone.width=128
rooms-small-transformer := backbone.width=132
rooms-small-gaussian := $(rooms-small-transformer)
rooms-small-tssm-xl := backbone.width=128 backbone.memory_length=46 backbone.segment_length=46
memory-small-rssm := dynamics.sequence_length=$(shell expr $(FRAMES) / 5) dynamics.updates=10000
doors-small-rssm := dynamics.sequence_length=28 dynamics.batch=8 dynamics.updates=15000
rooms-small-rssm := backbone.width=208 dynamics.sequence_length=23 dynamics.batch=8 dynamics.updates=12000

memory-small-protocols := reward generation
doors-small-protocols := generation doors
rooms-small-protocols := generation recall

runs = $(foreach model,$(MODELS),$(foreach seed,$(SEEDS),$(R)/$(1)-$(model)-$(seed)))

tables: $(foreach task,$(TASKS),$(addsuffix /evaluation/latest/manifest.json,$(call runs,$(task))))
	$(foreach task,$(TASKS),$(foreach protocol,$($(task)-protocols),wm compare $(call runs,$(task)) --protocol $(protocol) &&)) true
.PHONY: tables

define one
$(R)/$(1)-$(2)-$(3)/evaluation/latest/manifest.json:
	wm run $(1) --run $(R)/$(1)-$(2)-$(3) --seed $(3) --set training.threads=1 \
		$(foreach each,$($(1)) $($(2)) $($(1)-$(2)) $(SET),--set $(each))
endef
$(foreach task,$(TASKS),$(foreach model,$(MODELS),$(foreach seed,$(SEEDS),$(eval $(call one,$(task),$(model),$(seed))))))
