# What a user's own training image may look like: Debian, its Python, and TensorFlow in an environment of its own.
FROM keepstep-debian:12
RUN --mount=type=secret,id=apt,target=/etc/apt/apt.conf.d/99secret \
    apt-get update -qq \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends python3 python3-venv \
    && rm -rf /var/lib/apt/lists/*
COPY requirements/tensorflow.txt requirements/tf-keras.txt /tmp/
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    --mount=type=secret,id=ca \
    if [ -s /run/secrets/ca ]; then export PIP_CERT=/run/secrets/ca; fi; \
    python3 -m venv /opt/venv \
    && /opt/venv/bin/pip install -q --no-cache-dir --require-hashes -r /tmp/tensorflow.txt \
    && /opt/venv/bin/pip install -q --no-cache-dir --require-hashes --no-deps -r /tmp/tf-keras.txt
ENV PATH=/opt/venv/bin:$PATH
