#!/bin/sh
# As the image does it: the program is told how much of the card is its own.
cd "$(dirname "$0")" || exit 1
exec python3 main.py --total="$ALIYUN_COM_GPU_MEM_DEV" --allocated="$ALIYUN_COM_GPU_MEM_CONTAINER"
