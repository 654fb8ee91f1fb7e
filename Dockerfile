# Penstock on CPUs. torch's build for CPUs is not in the default index, so name one that has it (see docs/deploy.md):
#   docker build --build-arg PIP_EXTRA_INDEX_URL=… -t penstock .
ARG BASE=debian:bookworm-slim

FROM ${BASE} AS build
RUN apt-get update && apt-get install -y --no-install-recommends ca-certificates g++ python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
ENV PIP_NO_CACHE_DIR=1 PIP_NO_INPUT=1 PIP_DISABLE_PIP_VERSION_CHECK=1
ARG PIP_EXTRA_INDEX_URL
ARG PIP_FIND_LINKS
WORKDIR /src
COPY requirements/build.txt requirements/runtime.txt requirements/
RUN python3 -m venv /opt/penstock && python3 -m venv /opt/build && /opt/build/bin/pip install -r requirements/build.txt
RUN /opt/penstock/bin/pip install "$(grep '^torch==' requirements/runtime.txt)+cpu" \
    && /opt/penstock/bin/pip install -r requirements/runtime.txt
COPY pyproject.toml CMakeLists.txt LICENSE README.md ./
COPY cmake cmake
COPY csrc csrc
COPY man man
COPY penstock penstock
RUN PATH=/opt/build/bin:$PATH pip wheel --no-build-isolation --no-deps -w /opt/wheel . -C wheel.py-api=cp311 \
    && /opt/penstock/bin/pip install --no-deps /opt/wheel/*.whl \
    && /opt/penstock/bin/pip check && /opt/penstock/bin/pip uninstall -y pip setuptools

FROM ${BASE}
RUN apt-get update && apt-get install -y --no-install-recommends ca-certificates python3 tini \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 --user-group --home-dir /models --create-home penstock
COPY --from=build /opt/penstock /opt/penstock

LABEL org.opencontainers.image.title="Penstock" \
      org.opencontainers.image.description="Serves large language models over OpenAI's, Anthropic's and Ollama's APIs" \
      org.opencontainers.image.version="0.1.0" \
      org.opencontainers.image.licenses="Apache-2.0"

# All that is kept lies under /models: loaded models, packed weights, responses. The rest may be read-only but /tmp.
ENV PATH=/opt/penstock/bin:$PATH HOME=/models PENSTOCK_MODELS=/models/store HF_HOME=/models/huggingface \
    PENSTOCK_PACK_CACHE=/models/packed PENSTOCK_HOST=0.0.0.0 PENSTOCK_PORT=8000 PYTHONUNBUFFERED=1
WORKDIR /models
VOLUME /models
USER 10001:10001
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=10m --retries=6 CMD ["python", "-IS", "-c", \
  "import http.client as h, os, sys; c = h.HTTPConnection('127.0.0.1', int(os.environ['PENSTOCK_PORT']), timeout=4); \
c.request('GET', '/readyz'); sys.exit(c.getresponse().status != 200)"]
# tini collects processes that nobody else waits for. Other addresses than this container's own are refused without a key.
ENTRYPOINT ["tini", "--", "penstock", "serve"]
