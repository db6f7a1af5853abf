# The gateway, and with `tandem sim` the simulated engines, in one binary.
#
#   docker build -t tandem:0.1.0 .

FROM rust:1.95-slim-bookworm AS build
WORKDIR /src
# TLS is rustls with ring: a C compiler, no OpenSSL. The slim image has one.
COPY Cargo.toml Cargo.lock ./
COPY src src
COPY sim sim
# The scripts for Redis are compiled into the binary.
COPY lua lua
RUN --mount=type=cache,target=/usr/local/cargo/registry \
    --mount=type=cache,target=/src/target \
    cargo build --release --locked --bin tandem \
    && install -D --strip --mode 0755 target/release/tandem /out/tandem

FROM debian:bookworm-slim
# For rediss://, https collectors and the API server behind a public authority.
COPY --from=build /etc/ssl/certs/ca-certificates.crt /etc/ssl/certs/ca-certificates.crt
COPY --from=build /out/tandem /usr/local/bin/tandem
# A number, so that Kubernetes can see that it is not root. No such account is needed: nothing is written anywhere.
USER 65532:65532
EXPOSE 50052 8080
STOPSIGNAL SIGTERM
ENTRYPOINT ["tandem"]
CMD ["serve"]
