# One image, four entry points: `headrace pull | gateway | router | worker ...`.
# `make image` and the compose files name it by digest (deploy/pin_images.py renews it).
ARG PYTHON_IMAGE=python:3.11-slim-bookworm
FROM ${PYTHON_IMAGE} AS build
WORKDIR /src
RUN python -m venv /opt/headrace
# What it needs, exactly as it was tested: `make lock` writes the file.
COPY requirements.lock ./
RUN /opt/headrace/bin/pip install --no-cache-dir --no-deps --only-binary :all: --require-hashes -r requirements.lock
# What .dockerignore lets through.
COPY . .
RUN /opt/headrace/bin/pip install --no-cache-dir --no-deps --no-build-isolation . \
    && /opt/headrace/bin/pip check \
    && /opt/headrace/bin/pip uninstall --yes setuptools pip \
    && install -d /opt/headrace/share/headrace \
    && python deploy/sbom.py /opt/headrace/bin/python requirements.lock > /opt/headrace/share/headrace/sbom.cdx.json

FROM ${PYTHON_IMAGE}
RUN useradd --uid 10001 --create-home headrace && install -d -o headrace -g headrace /models /secrets
COPY --from=build /opt/headrace /opt/headrace
ENV PATH=/opt/headrace/bin:$PATH \
    HEADRACE_CACHE=/models \
    HF_HOME=/models/huggingface \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
# By number, so that others can tell that it is not root.
USER 10001:10001
# What a container is asked depends on what it runs: set the variable to HOST:PORT for a router or worker.
ENV HEADRACE_HEALTH_TARGET=http://127.0.0.1:8000
HEALTHCHECK --interval=5s --timeout=10s --start-period=120s CMD ["sh", "-c", "exec headrace health \"$HEADRACE_HEALTH_TARGET\""]
ENTRYPOINT ["headrace"]
CMD ["--help"]
