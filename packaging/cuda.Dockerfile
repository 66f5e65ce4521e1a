# Sluice for NVIDIA's GPUs: docker build -f packaging/cuda.Dockerfile -t sluice-cuda . && docker run --rm --gpus all sluice-cuda
# A run is the quickstart. The compiler and the library that Sluice opens (cuBLASLt) come from NVIDIA's packages in the Python
# package index; the driver comes from the host.
FROM debian:12
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility LD_LIBRARY_PATH=/usr/local/cuda/lib
ENV SLUICE_QUICKSTART_CUDA="80-real;90-real;100-real;120-virtual"
RUN apt-get update && apt-get install -y --no-install-recommends python3-venv g++ && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/cuda && /opt/cuda/bin/pip install --no-cache-dir "nvidia-cuda-nvcc==13.0.*" "nvidia-nvvm==13.0.*" \
    "nvidia-cuda-crt==13.0.*" "nvidia-cuda-runtime==13.0.*" "nvidia-cuda-cccl==13.0.*" "nvidia-cublas==13.1.*" \
    && ln -s /opt/cuda/lib/python3.11/site-packages/nvidia/cu13 /usr/local/cuda && ln -s lib /usr/local/cuda/lib64 \
    && ln -s libcudart.so.13 /usr/local/cuda/lib/libcudart.so
COPY . /root/sluice
WORKDIR /root/sluice
RUN tools/quickstart.sh --prepare && rm -rf /var/lib/apt/lists/*
RUN ln -s /root/sluice/build/quickstart/tools/sluice /usr/local/bin/sluice
CMD ["tools/quickstart.sh"]
