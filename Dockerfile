# The server on a CPU, as a user without rights.
#   docker build -t sparsekv-cli .
#   docker run -p 8080:8080 -e SPARSEKV_API_KEY=KEY -v sparsekv:/data sparsekv-cli
# -m and other options of serve go at the end: docker run ... sparsekv-cli -m OWNER/REPO:Q4_K_M
FROM python:3.12-slim AS build
WORKDIR /src
COPY . .
RUN python -m venv /opt/sparsekv && /opt/sparsekv/bin/pip install --no-cache-dir '.[serve,grammar,hub,docs]'

FROM python:3.12-slim
RUN useradd --uid 10001 --create-home sparsekv && mkdir /data && chown sparsekv /data
COPY --from=build /opt/sparsekv /opt/sparsekv
USER sparsekv
# Models, compiled kernels, prompts and calibrations.
ENV PATH=/opt/sparsekv/bin:$PATH SPARSEKV_MODELS=/data/models XDG_CACHE_HOME=/data/cache \
    HF_HOME=/data/huggingface SPARSEKV_MODEL=smollm2
VOLUME /data
EXPOSE 8080
# The first start compiles kernels for this CPU.
HEALTHCHECK --start-period=300s --interval=30s --timeout=5s \
    CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://localhost:8080/health', timeout=4)"]
# "$@" are options of serve. smollm2 is downloaded once, if no other model is named.
ENTRYPOINT ["sh", "-c", "case \" $* \" in *' -m'*) ;; *) [ \"$SPARSEKV_MODEL\" != smollm2 ] || sparsekv-cli models get smollm2 ;; esac; exec sparsekv-cli serve --host 0.0.0.0 \"$@\"", "serve"]
