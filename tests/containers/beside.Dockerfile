# What stands beside a job in docker/compose.yaml, for machines that can not pull it: each target starts as the image that it
# stands for. S3 comes with all of the tests' own environment, since that is where moto is pinned.
FROM keepstep-debian:12 AS s3
RUN --mount=type=secret,id=apt,target=/etc/apt/apt.conf.d/99secret \
    apt-get update -qq \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends python3 python3-venv \
    && rm -rf /var/lib/apt/lists/*
COPY requirements/dev.txt /tmp/
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    --mount=type=secret,id=ca \
    if [ -s /run/secrets/ca ]; then export PIP_CERT=/run/secrets/ca; fi; \
    python3 -m venv /opt/venv \
    && /opt/venv/bin/pip install -q --no-cache-dir --require-hashes -r /tmp/dev.txt
ENV PATH=/opt/venv/bin:$PATH
ENTRYPOINT ["moto_server", "-H", "0.0.0.0"]

FROM keepstep-debian:12 AS prometheus
RUN --mount=type=secret,id=apt,target=/etc/apt/apt.conf.d/99secret \
    apt-get update -qq \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends prometheus \
    && rm -rf /var/lib/apt/lists/*
ENTRYPOINT ["prometheus"]
CMD ["--config.file=/etc/prometheus/prometheus.yml", "--storage.tsdb.path=/prometheus"]
