"""Bytes of weights: read, decoded, digested, and certified against the files.

reading       parts of tensors, from files to memory; fill: what each kind of parameter's memory holds
quantized     FP8 and 4-bit parameters; four_bits: the codes; dequantize_kernel: a GPU decodes them in one pass
blanks        zeros where weights should be
certificate   each weight in memory compared with a second reading of the files
expert_shards the experts that this rank has of split ones, and their part of an adapter
digest        one number for all weights, equal for any sharding
same_base     the base that an adapter was trained on, and whether this is the same
"""
