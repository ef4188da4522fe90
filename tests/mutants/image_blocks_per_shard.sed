# src/plan/tokens.c
# Blocks numbered shard by shard: one that crosses an edge becomes two.
s/if (run->vision && touches && before->vision) {/if (run->vision \&\& touches \&\& before->vision > 1) {/
