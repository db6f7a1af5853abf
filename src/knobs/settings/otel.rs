//! The settings of tracing.

use super::{Group, one};

/// OpenTelemetry.
pub(super) const OTEL: Group = Group {
    title: "OpenTelemetry",
    settings: &[
        one(
            "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
            "unset",
            "URL",
            "",
            "Where spans go, path included. Setting this or the next turns tracing on.",
        ),
        one("OTEL_EXPORTER_OTLP_ENDPOINT", "unset", "URL", "", "Where spans go; over HTTP, `/v1/traces` is appended."),
        one("OTEL_SDK_DISABLED", "false", "boolean", "", "Turns tracing off."),
        one("OTEL_TRACES_EXPORTER", "otlp", "`otlp` or `none`", "", "`none` turns tracing off."),
        one("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "unset", "see next", "", "Wins over the next."),
        one("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc", "`grpc`, `http/protobuf` or `http`", "", "How spans are sent."),
        one("OTEL_EXPORTER_OTLP_TRACES_HEADERS", "unset", "`key=value,…`, secret", "", "Wins over the next."),
        one(
            "OTEL_EXPORTER_OTLP_HEADERS",
            "unset",
            "`key=value,…`, secret",
            "",
            "Sent with each export; values are percent-encoded.",
        ),
        one("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "unset", "milliseconds", "", "Wins over the next."),
        one("OTEL_EXPORTER_OTLP_TIMEOUT", "10000", "milliseconds", "", "Bound on one export."),
        one(
            "OTEL_EXPORTER_OTLP_INSECURE",
            "false",
            "boolean",
            "",
            "Spans are sent in the clear to an `https` endpoint, and to one without a scheme, which stands for `https` \
             otherwise.",
        ),
        one(
            "OTEL_EXPORTER_OTLP_INSECURE_SKIP_VERIFY",
            "false",
            "boolean",
            "",
            "Any certificate of the collector will do. Spans and headers can then be read by whoever gets in between.",
        ),
        one("OTEL_EXPORTER_OTLP_TRACES_CERTIFICATE", "unset", "path of a PEM file", "", "Wins over the next."),
        one(
            "OTEL_EXPORTER_OTLP_CERTIFICATE",
            "unset",
            "path of a PEM file",
            "",
            "Authorities of the collector's certificate; unset means those of the machine. Read once, at the start, as are \
             the next four.",
        ),
        one("OTEL_EXPORTER_OTLP_TRACES_CLIENT_CERTIFICATE", "unset", "path of a PEM file", "", "Wins over the next."),
        one(
            "OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE",
            "unset",
            "path of a PEM file",
            "",
            "Shown to the collector. Needs the key.",
        ),
        one("OTEL_EXPORTER_OTLP_TRACES_CLIENT_KEY", "unset", "path of a PEM file", "", "Wins over the next."),
        one("OTEL_EXPORTER_OTLP_CLIENT_KEY", "unset", "path of a PEM file", "", "Key of the client certificate."),
        one("OTEL_SERVICE_NAME", "aibrix-gateway-plugin", "text", "", "Resource attribute `service.name`."),
        one("OTEL_RESOURCE_ATTRIBUTES", "unset", "`key=value,…`", "", "Further resource attributes."),
        one(
            "POD_NAMESPACE",
            "unset",
            "text",
            "",
            "Resource attribute `k8s.namespace.name`; `POD_NAME` is `k8s.pod.name`.",
        ),
        one("POD_UID", "unset", "text", "", "Resource attribute `k8s.pod.uid`."),
        one("NODE_NAME", "unset", "text", "", "Resource attribute `k8s.node.name`."),
        one(
            "OTEL_PROPAGATORS",
            "tracecontext",
            "`tracecontext`, `baggage`, `none`",
            "",
            "Without `tracecontext`, callers' trace context is not taken up and goes to the engines as it came.",
        ),
        one(
            "OTEL_TRACES_SAMPLER",
            "parentbased_always_on",
            "`always_on`, `always_off`, `traceidratio`, or one of these after `parentbased_`",
            "",
            "Which traces are recorded.",
        ),
        one("OTEL_TRACES_SAMPLER_ARG", "1", "0 to 1", "", "Share of traces for the `traceidratio` samplers."),
        one("OTEL_BSP_MAX_QUEUE_SIZE", "2048", "spans", "", "Spans waiting for export; more are dropped."),
        one("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "512", "spans", "", "Spans sent together."),
        one("OTEL_BSP_SCHEDULE_DELAY", "5000", "milliseconds", "", "Longest wait before an export."),
    ],
};
