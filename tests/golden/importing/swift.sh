#!/bin/bash
# 14 GiB
CUDA_VISIBLE_DEVICES=0,1 \
NPROC_PER_NODE=2 \
swift sft \
    --model ./qwen \
    --tuner_type lora \
    --dataset 'rows.jsonl#500' \
    --torch_dtype bfloat16 \
    --num_train_epochs 1 \
    --learning_rate 1e-4 \
    --lora_rank 8 --lora_alpha=32 \
    --target_modules q_proj v_proj \
    --gradient_accumulation_steps 16 \
    --eval_strategy no --save_steps 50 \
    --max_length 2048 \
    --deepspeed zero3 \
    --attn_impl flash_attn
