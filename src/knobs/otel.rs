//! The `OTEL_*` variables, as the OpenTelemetry specification reads them.

use std::path::PathBuf;
use std::time::Duration;

use super::Secret;
use super::parse;
use super::read::Reader;
use super::tls::path;

/// How spans travel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OtlpProtocol {
    /// gRPC.
    Grpc,
    /// Protobuf over HTTP/1.1.
    HttpProtobuf,
}

/// Which traces are recorded.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TraceSampler {
    /// Follow the caller's decision where there is a caller.
    pub parent_based: bool,
    /// Share of the other traces, 0..=1.
    pub ratio: f64,
}

/// TLS towards the collector.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OtlpTls {
    /// `OTEL_EXPORTER_OTLP_CERTIFICATE` (unset: those of the machine): authorities of the collector's certificate.
    pub authorities: Option<PathBuf>,
    /// `OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE` (unset).
    pub client_cert: Option<PathBuf>,
    /// `OTEL_EXPORTER_OTLP_CLIENT_KEY` (unset).
    pub client_key: Option<PathBuf>,
    /// `OTEL_EXPORTER_OTLP_INSECURE_SKIP_VERIFY` (false).
    pub skip_verify: bool,
}

/// Everything about span export.
#[derive(Clone, Debug, PartialEq)]
pub struct OtelKnobs {
    /// The effective endpoint, path included for HTTP; `None` = tracing is off.
    pub endpoint: Option<String>,
    /// Protocol (`grpc`).
    pub protocol: OtlpProtocol,
    /// Headers sent with each export.
    pub headers: Vec<(String, Secret)>,
    /// Send in the clear even if the endpoint says `https`.
    pub insecure: bool,
    /// How an `https` endpoint is spoken to.
    pub tls: OtlpTls,
    /// Bound on one export (10 s).
    pub timeout: Duration,
    /// `service.name`.
    pub service_name: String,
    /// Resource attributes beside it: the operator's, then `service.instance.id` and what Kubernetes says of the pod.
    pub resource_attributes: Vec<(String, String)>,
    /// Take up callers' trace context and send ours to engines (`tracecontext` among the propagators).
    pub propagate: bool,
    /// Sampler (follow the caller, else record).
    pub sampler: TraceSampler,
    /// Spans waiting for export (2048); more are dropped and counted.
    pub queue_size: usize,
    /// Spans sent together (512).
    pub batch_size: usize,
    /// Longest wait before an export (5 s).
    pub schedule_delay: Duration,
}

/// What Kubernetes' downward API says, and the attribute that it is.
const DOWNWARD: [(&str, &str); 4] = [
    ("POD_NAME", "k8s.pod.name"),
    ("POD_NAMESPACE", "k8s.namespace.name"),
    ("POD_UID", "k8s.pod.uid"),
    ("NODE_NAME", "k8s.node.name"),
];

/// `replica`: this replica's name, and whether `POD_NAME` says so.
pub(super) fn read(reader: &mut Reader<'_>, replica: (&str, bool)) -> OtelKnobs {
    let as_is = |text: &str| Ok(text.to_owned());
    let traces_endpoint = reader.optional("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", as_is, without_credentials);
    let base_endpoint = reader.optional("OTEL_EXPORTER_OTLP_ENDPOINT", as_is, without_credentials);
    let disabled = reader.value("OTEL_SDK_DISABLED", false, parse::boolean, bool::to_string);
    let exporter = reader.choice("OTEL_TRACES_EXPORTER", true, &[("otlp", true), ("none", false)]);

    let protocols = [
        ("grpc", OtlpProtocol::Grpc),
        ("http/protobuf", OtlpProtocol::HttpProtobuf),
        ("http", OtlpProtocol::HttpProtobuf),
    ];
    let traces_protocol = reader.optional_choice("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", &protocols);
    let base_protocol = reader.choice("OTEL_EXPORTER_OTLP_PROTOCOL", OtlpProtocol::Grpc, &protocols);
    let protocol = traces_protocol.unwrap_or(base_protocol);

    let traces_headers = reader.secret_pairs("OTEL_EXPORTER_OTLP_TRACES_HEADERS");
    let base_headers = reader.secret_pairs("OTEL_EXPORTER_OTLP_HEADERS");
    let traces_timeout = reader.optional("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", parse::milliseconds, super::read::millis);
    let base_timeout =
        reader.value("OTEL_EXPORTER_OTLP_TIMEOUT", Duration::from_secs(10), parse::milliseconds, super::read::millis);
    let insecure = reader.value("OTEL_EXPORTER_OTLP_INSECURE", false, parse::boolean, bool::to_string);

    let tls = read_tls(reader);

    let service_name = reader.text("OTEL_SERVICE_NAME");
    let mut resource_attributes = reader
        .optional("OTEL_RESOURCE_ATTRIBUTES", parse::pairs, |pairs| {
            pairs.iter().map(|(key, value)| format!("{key}={value}")).collect::<Vec<_>>().join(",")
        })
        .unwrap_or_default();
    // The variable made for it wins over the general one.
    let named = resource_attributes.iter().position(|(key, _)| key == "service.name");
    let attribute_name = named.map(|index| resource_attributes.remove(index).1);
    let service_name = service_name.or(attribute_name).unwrap_or_else(|| "aibrix-gateway-plugin".to_owned());

    let pod_name = replica.1.then(|| replica.0.to_owned());
    let of_pod = DOWNWARD.map(|(variable, key)| {
        let value = if variable == "POD_NAME" { pod_name.clone() } else { reader.text(variable) };
        value.map(|value| (key, value))
    });
    let instance = ("service.instance.id", replica.0.to_owned());
    for (key, value) in std::iter::once(instance).chain(of_pod.into_iter().flatten()) {
        if !resource_attributes.iter().any(|(known, _)| known == key) {
            resource_attributes.push((key.to_owned(), value));
        }
    }
    let propagate =
        reader.value("OTEL_PROPAGATORS", true, propagators, |on| if *on { "tracecontext" } else { "none" }.to_owned());

    let sampler = reader.choice(
        "OTEL_TRACES_SAMPLER",
        (true, Some(1.0)),
        &[
            ("parentbased_always_on", (true, Some(1.0))),
            ("parentbased_always_off", (true, Some(0.0))),
            ("parentbased_traceidratio", (true, None)),
            ("always_on", (false, Some(1.0))),
            ("always_off", (false, Some(0.0))),
            ("traceidratio", (false, None)),
        ],
    );
    let ratio = reader.value(
        "OTEL_TRACES_SAMPLER_ARG",
        1.0,
        |text| text.parse().ok().filter(|ratio| (0.0..=1.0).contains(ratio)).ok_or("a number from 0 to 1"),
        f64::to_string,
    );

    let queue_size = reader.value("OTEL_BSP_MAX_QUEUE_SIZE", 2048, parse::positive_size, usize::to_string);
    let batch_size = reader.value("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", 512, parse::positive_size, usize::to_string);
    let schedule_delay =
        reader.value("OTEL_BSP_SCHEDULE_DELAY", Duration::from_secs(5), parse::milliseconds, super::read::millis);

    let base_endpoint = base_endpoint.map(|base| match protocol {
        OtlpProtocol::Grpc => base,
        OtlpProtocol::HttpProtobuf => format!("{}/v1/traces", base.trim_end_matches('/')),
    });
    let endpoint = if disabled || !exporter { None } else { traces_endpoint.or(base_endpoint) };
    if !insecure && endpoint.as_ref().is_some_and(|endpoint| !endpoint.contains("://")) {
        reader.warn(
            "the OTLP endpoint has no scheme: it is spoken to over TLS; write http:// for a collector without it",
        );
    }
    OtelKnobs {
        endpoint: endpoint.map(|endpoint| with_scheme(endpoint, insecure)),
        protocol,
        headers: traces_headers.or(base_headers).unwrap_or_default(),
        insecure,
        tls,
        timeout: traces_timeout.unwrap_or(base_timeout),
        service_name,
        resource_attributes,
        propagate,
        sampler: TraceSampler { parent_based: sampler.0, ratio: sampler.1.unwrap_or(ratio) },
        queue_size,
        batch_size: batch_size.min(queue_size),
        schedule_delay,
    }
}

/// Whether `tracecontext` is among them. `baggage` goes to both legs as it came, whatever is said here.
fn propagators(text: &str) -> Result<bool, parse::Expected> {
    let mut names = text.split(',').map(str::trim).filter(|name| !name.is_empty());
    if names.clone().all(|name| ["tracecontext", "baggage", "none"].contains(&name)) {
        Ok(names.any(|name| name == "tracecontext"))
    } else {
        Err("`tracecontext`, `baggage`, or `none`")
    }
}

/// A URL for the report: `user:password@` is not shown.
#[allow(clippy::ptr_arg, reason = "the reader shows a &String")]
fn without_credentials(endpoint: &String) -> String {
    let (scheme, rest) = endpoint.split_once("://").unwrap_or(("", endpoint));
    let authority_end = rest.find('/').unwrap_or(rest.len());
    match rest.get(..authority_end).and_then(|authority| authority.rfind('@')) {
        None => endpoint.clone(),
        Some(at) => format!("{scheme}://[secret]{}", rest.get(at..).unwrap_or_default()),
    }
}

fn read_tls(reader: &mut Reader<'_>) -> OtlpTls {
    let mut file = |of_traces, of_all| {
        let (of_traces, of_all) = (path(reader, of_traces), path(reader, of_all));
        of_traces.or(of_all)
    };
    let tls = OtlpTls {
        authorities: file("OTEL_EXPORTER_OTLP_TRACES_CERTIFICATE", "OTEL_EXPORTER_OTLP_CERTIFICATE"),
        client_cert: file("OTEL_EXPORTER_OTLP_TRACES_CLIENT_CERTIFICATE", "OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE"),
        client_key: file("OTEL_EXPORTER_OTLP_TRACES_CLIENT_KEY", "OTEL_EXPORTER_OTLP_CLIENT_KEY"),
        skip_verify: reader.value("OTEL_EXPORTER_OTLP_INSECURE_SKIP_VERIFY", false, parse::boolean, bool::to_string),
    };
    if tls.skip_verify {
        reader.warn("OTEL_EXPORTER_OTLP_INSECURE_SKIP_VERIFY is set: the certificate of the collector is not checked");
    }
    tls
}

/// An endpoint without a scheme is spoken to over TLS, unless `OTEL_EXPORTER_OTLP_INSECURE` says otherwise, which holds
/// for `https` as well.
fn with_scheme(endpoint: String, insecure: bool) -> String {
    match endpoint.split_once("://") {
        None if insecure => format!("http://{endpoint}"),
        None => format!("https://{endpoint}"),
        Some(("https", rest)) if insecure => format!("http://{rest}"),
        Some(_) => endpoint,
    }
}
