//! Variables that the reference gateway or OpenTelemetry knows and this version does not act on. Setting one is reported once, so that
//! nobody believes in an effect that is not there.

use super::aibrix::{self, Row, Verdict};

/// Variables of OpenTelemetry, in the form of the reference's: any value is reported.
const OTEL: [Row; 3] = [
    otel("OTEL_EXPORTER_OTLP_COMPRESSION", UNCOMPRESSED),
    otel("OTEL_EXPORTER_OTLP_TRACES_COMPRESSION", UNCOMPRESSED),
    otel("OTEL_BSP_EXPORT_TIMEOUT", "`OTEL_EXPORTER_OTLP_TIMEOUT` bounds an export"),
];

const UNCOMPRESSED: &str = "spans are sent without compression";

const fn otel(name: &'static str, note: &'static str) -> Row {
    Row { name, there: "", verdict: Verdict::Absent, note }
}

/// Every variable without effect, with what to know instead.
pub(super) fn inert() -> impl Iterator<Item = Row> {
    OTEL.into_iter().chain(aibrix::rows(aibrix::VARIABLES).filter(|row| row.verdict == Verdict::Absent))
}

/// `tcp://10.0.0.7:6379`: what Kubernetes puts into `REDIS_PORT` beside a service called `redis`. It is nobody's wish.
pub(super) fn is_service_url(value: &str) -> bool {
    ["tcp://", "udp://", "sctp://"].iter().any(|scheme| value.starts_with(scheme))
}

/// Kubernetes puts variables like `AIBRIX_GATEWAY_PLUGINS_SERVICE_HOST` and `…_PORT_80_TCP_ADDR` into every container
/// of a namespace; they are not settings.
pub(super) fn is_service_link(name: &str) -> bool {
    name.ends_with("_SERVICE_HOST")
        || name.contains("_SERVICE_PORT")
        || name.ends_with("_PORT")
        || name.rsplit_once("_PORT_").is_some_and(|(_, rest)| rest.starts_with(|c: char| c.is_ascii_digit()))
}
