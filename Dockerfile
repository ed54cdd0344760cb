# Runs tnp on a CPU, and on a GPU that the host passes on: `docker run --gpus all`.
#     docker build --tag tnp . && docker run -v "$PWD/figures:/tnp/figures" tnp   # draws figures
#     docker run -it --entrypoint bash tnp                                         # for the rest
# PyTorch is the build that pip chooses. README's section "Install" says where its smaller CPU build
# is: `--build-arg PIP_EXTRA_INDEX_URL=<that index>`. For a GPU leave this out.
FROM python:3.12-slim
RUN apt-get update && apt-get install --yes --no-install-recommends g++ make \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /tnp
COPY . .
ARG PIP_EXTRA_INDEX_URL
RUN make .venv/installed
CMD ["make", "figures"]
