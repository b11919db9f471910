# A user's training image with Horovod: Debian, its Open MPI and Python, TensorFlow, and no sshd.
FROM keepstep-debian:12 AS build
RUN --mount=type=secret,id=apt,target=/etc/apt/apt.conf.d/99secret \
    apt-get update -qq \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
        g++ libopenmpi-dev make openmpi-bin python3-dev python3-venv
COPY requirements/horovod-build.txt requirements/horovod.txt /tmp/
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    --mount=type=secret,id=ca \
    set -eu; \
    if [ -s /run/secrets/ca ]; then export PIP_CERT=/run/secrets/ca; fi; \
    python3 -m venv /opt/venv; \
    /opt/venv/bin/pip install -q --no-cache-dir --require-hashes -r /tmp/horovod-build.txt; \
    sed '/^horovod==/,/^[^ ]/{/^horovod==/d;/^ /d}' /tmp/horovod.txt >/tmp/first.txt; \
    /opt/venv/bin/pip install -q --no-cache-dir --require-hashes -r /tmp/first.txt; \
    export PATH=/opt/venv/bin:$PATH MAKEFLAGS=-j2 HOROVOD_WITH_TENSORFLOW=1 HOROVOD_WITH_MPI=1 HOROVOD_WITHOUT_GLOO=1 \
        HOROVOD_WITHOUT_PYTORCH=1 HOROVOD_WITHOUT_MXNET=1; \
    pip install -q --no-cache-dir --no-build-isolation --require-hashes -r /tmp/horovod.txt

FROM keepstep-debian:12
RUN --mount=type=secret,id=apt,target=/etc/apt/apt.conf.d/99secret \
    apt-get update -qq \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends openmpi-bin python3 python3-venv \
    && rm -rf /var/lib/apt/lists/*
COPY --from=build /opt/venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH
