# MonoBeast and PolyBeast on Debian 12; no compiler and no root in the image.
#
#   docker build --tag torchbeast .
#   docker run --rm -it -v torchbeast-logs:/home/torchbeast/logs torchbeast --env PongNoFrameskip-v4
#
# The container runs PolyBeast with the given arguments. If the first argument is the name
# of a module, it runs that module:
# `docker run ... --shm-size 2g torchbeast torchbeast.monobeast --env ...`.
#
# `--target environments` makes an image for machines that only step environments. It has
# no PyTorch, and its container runs polybeast_env with the given arguments.

# --- Build: the compiler and headers stay in this stage ---
FROM debian:bookworm-slim AS build
RUN apt-get update && apt-get install --yes --no-install-recommends \
        g++ make cmake pkg-config python3-dev python3-venv \
        libgrpc++-dev libprotobuf-dev protobuf-compiler
RUN python3 -m venv /opt/torchbeast
ENV PATH=/opt/torchbeast/bin:$PATH

# pip prefers PyTorch's CPU build if an index has it; the usual index has the CUDA build.
# No defaults here: pip does not treat an empty value as unset.
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
WORKDIR /source
COPY constraints.txt requirements.txt ./
RUN pip install --no-cache-dir --constraint constraints.txt --requirement requirements.txt
RUN python3 -m venv /opt/environments && grep -v '^torch' requirements.txt >environments.txt && \
    /opt/environments/bin/pip install --no-cache-dir --constraint constraints.txt --requirement environments.txt

COPY CMakeLists.txt LICENSE README.md pyproject.toml setup.py ./
COPY libtorchbeast libtorchbeast/
COPY nest nest/
COPY torchbeast torchbeast/
# Extras of pyproject.toml, such as minatar,plot.
ARG EXTRAS=
RUN TORCHBEAST_NATIVE=require pip install --no-cache-dir --constraint constraints.txt ".${EXTRAS:+[$EXTRAS]}"
# Packages of your environments, such as MinAtar.
ARG PACKAGES=
RUN TORCHBEAST_NATIVE=require /opt/environments/bin/pip install --no-cache-dir --constraint constraints.txt --no-deps . && \
    if [ "$PACKAGES" ]; then /opt/environments/bin/pip install --no-cache-dir --constraint constraints.txt $PACKAGES; fi

# Remove files that only serve to build against PyTorch or to test it: 180 MB.
RUN cd /opt/torchbeast/lib/python3*/site-packages/torch && \
    find bin -type f ! -name torch_shm_manager -delete && \
    rm -rf include test

# --- Environments ---
FROM debian:bookworm-slim AS environments
# tini is process 1: it forwards signals and reaps servers that lost their parent.
RUN apt-get update && apt-get install --yes --no-install-recommends \
        python3 libgrpc++1.51 libprotobuf32 tini && \
    rm -rf /var/lib/apt/lists/*
RUN useradd --create-home --uid 1000 torchbeast
COPY --from=build /opt/environments /opt/environments
ENV PATH=/opt/environments/bin:$PATH HOME=/home/torchbeast
USER 1000
WORKDIR /home/torchbeast
ENTRYPOINT ["tini", "--", "python", "-m", "torchbeast.polybeast_env"]

# --- Run ---
FROM debian:bookworm-slim
# tini is process 1: it forwards signals and reaps servers that lost their parent.
RUN apt-get update && apt-get install --yes --no-install-recommends \
        python3 libgrpc++1.51 libprotobuf32 tini && \
    rm -rf /var/lib/apt/lists/*
RUN useradd --create-home --uid 1000 torchbeast && \
    install --directory --owner torchbeast --group torchbeast /home/torchbeast/logs
COPY --from=build /opt/torchbeast /opt/torchbeast
ENV PATH=/opt/torchbeast/bin:$PATH HOME=/home/torchbeast
USER 1000
WORKDIR /home/torchbeast
# The default --savedir is /home/torchbeast/logs/torchbeast.
VOLUME /home/torchbeast/logs
ENTRYPOINT ["tini", "--", "sh", "-c", "case ${1--} in -*) set -- torchbeast.polybeast \"$@\" ;; esac; exec python -m \"$@\"", "sh"]
