//! From the environment to [`Knobs`].

use std::sync::Arc;
use std::time::Duration;

use super::env::{Environment, Origin, Refusal, Report, Setting};
use super::parse::{self, Expected};
use super::{
    Addressing, Drain, Ejection, Knobs, KvConnector, LogFormat, LogKnobs, MetricLabels, PdKnobs, PrefixKnobs,
    ScrapeKnobs, Secret, Tokenizer, api, carried, decode, engine_auth, inert, kubernetes, limits, models, otel,
    parse_strategy, plane, settings, strategies, tls,
};

/// How much of a bad value a warning repeats.
const SHOWN_CHARS: usize = 80;

/// Reads settings one by one and keeps the report.
pub(super) struct Reader<'a> {
    environment: &'a dyn Environment,
    report: Report,
}

impl Reader<'_> {
    /// The trimmed text of a variable; an empty one counts as unset, as manifests often set it so.
    pub(super) fn raw(&self, name: &'static str) -> Option<String> {
        self.environment.get(name).map(|text| text.trim().to_owned()).filter(|text| !text.is_empty())
    }

    pub(super) fn record(&mut self, name: &'static str, value: String, origin: Origin) {
        self.report.settings.push(Setting { name, value, origin });
    }

    pub(super) fn complain(&mut self, name: &'static str, text: &str, expected: &str, instead: &str) {
        self.report.config_errors += 1;
        let shown = shorten(text);
        self.report.warnings.push(format!("{name} is {shown:?}, but must be {expected}: using {instead}"));
    }

    /// What a value costs that asks for nothing wrong.
    pub(super) fn note(&mut self, note: String) {
        self.report.notes.push(note);
    }

    /// Something to know about values that can be used.
    pub(super) fn warn(&mut self, warning: &str) {
        self.report.warnings.push(warning.to_owned());
    }

    /// A setting with a default.
    pub(super) fn value<T>(
        &mut self,
        name: &'static str,
        default: T,
        parse: impl Fn(&str) -> Result<T, Expected>,
        show: impl Fn(&T) -> String,
    ) -> T {
        let (value, origin) = match self.raw(name) {
            None => (default, Origin::Default),
            Some(text) => match parse(&text) {
                Ok(value) => (value, Origin::Environment),
                Err(expected) => {
                    self.complain(name, &text, expected, &show(&default));
                    (default, Origin::DefaultAfterBadValue)
                }
            },
        };
        self.record(name, show(&value), origin);
        value
    }

    /// A setting that may be unset.
    pub(super) fn optional<T>(
        &mut self,
        name: &'static str,
        parse: impl Fn(&str) -> Result<T, Expected>,
        show: impl Fn(&T) -> String,
    ) -> Option<T> {
        let some = |text: &str| parse(text).map(Some);
        self.value(name, None, some, |value| value.as_ref().map_or_else(|| "unset".to_owned(), &show))
    }

    /// Free text that may be unset.
    pub(super) fn text(&mut self, name: &'static str) -> Option<String> {
        self.optional(name, |text| Ok(text.to_owned()), String::clone)
    }

    pub(super) fn secret(&mut self, name: &'static str) -> Option<Secret> {
        self.optional(name, |text| Ok(Secret::new(text)), |secret| format!("{secret:?}"))
    }

    /// `key=value,…` whose values are secret. A bad one is named, not shown.
    pub(super) fn secret_pairs(&mut self, name: &'static str) -> Option<Vec<(String, Secret)>> {
        let text = self.raw(name);
        let (value, origin) = match text.as_deref().map(parse::pairs) {
            None => (None, Origin::Default),
            Some(Ok(pairs)) => (Some(pairs), Origin::Environment),
            Some(Err(expected)) => {
                self.complain(name, "[secret]", expected, "none");
                (None, Origin::DefaultAfterBadValue)
            }
        };
        self.record(name, value.as_ref().map_or("unset", |_| "[secret]").to_owned(), origin);
        value.map(|pairs| pairs.into_iter().map(|(key, value)| (key, Secret::new(value))).collect())
    }

    /// One of several names.
    pub(super) fn choice<T: Copy + PartialEq>(
        &mut self,
        name: &'static str,
        default: T,
        choices: &[(&'static str, T)],
    ) -> T {
        self.choice_or_later(name, default, choices, &[])
    }

    /// [`Reader::choice`] without a default.
    pub(super) fn optional_choice<T: Copy + PartialEq>(
        &mut self,
        name: &'static str,
        choices: &[(&'static str, T)],
    ) -> Option<T> {
        let choices: Vec<_> = choices.iter().map(|(text, value)| (*text, Some(*value))).collect();
        self.choice_or_later(name, None, &choices, &[])
    }

    /// [`Reader::choice`] with names that are right, but not built yet.
    fn choice_or_later<T: Copy + PartialEq>(
        &mut self,
        name: &'static str,
        default: T,
        choices: &[(&'static str, T)],
        later: &[&str],
    ) -> T {
        let show = |value: T| choices.iter().find(|(_, choice)| *choice == value).map_or("unset", |(text, _)| *text);
        let mut value = (default, Origin::Default);
        if let Some(text) = self.raw(name) {
            if let Some((_, choice)) = choices.iter().find(|(choice, _)| *choice == text) {
                value = (*choice, Origin::Environment);
            } else {
                value.1 = Origin::DefaultAfterBadValue;
                if later.contains(&text.as_str()) {
                    self.report.config_errors += 1;
                    let warning = format!("{name} is {text:?}, which is not built yet: using {}", show(default));
                    self.report.warnings.push(warning);
                } else {
                    let names: Vec<_> = choices.iter().map(|(text, _)| *text).collect();
                    self.complain(name, &text, &format!("one of {}", names.join(", ")), show(default));
                }
            }
        }
        self.record(name, show(value.0).to_owned(), value.1);
        value.0
    }

    fn report_inert(&mut self) {
        for row in inert::inert() {
            let said = |value: &str| row.name == carried::STATESYNC && parse::boolean(value).is_ok();
            let silent = |value: &str| inert::is_service_url(value) || row.asks_for_nothing(value) || said(value);
            if self.raw(row.name).is_some_and(|value| !silent(&value)) {
                self.report.warnings.push(format!("{} is set, but has no effect here: {}", row.name, row.note));
            }
        }
        let known: Vec<&str> =
            settings::GROUPS.iter().flat_map(|group| group.settings).map(|setting| setting.name).collect();
        let mut unknown: Vec<String> = self
            .environment
            .names()
            .into_iter()
            .filter(|name| name.starts_with("AIBRIX_") || name.starts_with("TANDEM_"))
            .filter(|name| !known.contains(&name.as_str()) && !inert::inert().any(|row| row.name == name.as_str()))
            .filter(|name| !inert::is_service_link(name))
            .collect();
        unknown.sort();
        for name in unknown {
            self.report.warnings.push(format!("{} is set, but has no effect here: no such setting", shorten(&name)));
        }
    }
}

fn shorten(text: &str) -> String {
    match text.char_indices().nth(SHOWN_CHARS) {
        None => text.to_owned(),
        Some((end, _)) => format!("{}…", text.get(..end).unwrap_or_default()),
    }
}

/// Milliseconds for the report.
pub(super) fn millis(duration: &Duration) -> String {
    duration.as_millis().to_string()
}

pub(super) fn secs(duration: &Duration) -> String {
    duration.as_secs().to_string()
}

impl Knobs {
    /// Reads and checks everything. A value that is not usable leaves the default in place and is reported; only what
    /// would make every request fail refuses the start.
    pub fn read(environment: &dyn Environment) -> Result<(Knobs, Report), Refusal> {
        let mut reader = Reader { environment, report: Report::default() };
        let host_name = environment.host_name().unwrap_or_else(|| "unknown".to_owned());
        let gateway_pod = reader.value("POD_NAME", host_name, |text| Ok(text.to_owned()), String::clone);
        let strategy = |text: &str| match parse_strategy(text) {
            Ok(_) => Ok(text.to_owned()),
            Err(_) => Err("a routing strategy or a list like least-request:2,prefix-cache"),
        };
        let routing_algorithm = reader.optional("ROUTING_ALGORITHM", strategy, String::clone);
        if let Some(note) = routing_algorithm.as_deref().and_then(|name| parse_strategy(name).ok()?.1.text()) {
            reader.warn(&format!("ROUTING_ALGORITHM: {note}"));
        }
        let auth_bearer_token = reader.secret("AIBRIX_AUTH_BEARER_TOKEN");
        let disable_rate_limiting =
            reader.value("AIBRIX_DISABLE_RATE_LIMITING", false, parse::boolean, bool::to_string);
        let admin_token = reader.secret("TANDEM_ADMIN_TOKEN");
        let ttft_threshold =
            reader.value("AIBRIX_TTFT_THRESHOLD_S", Duration::from_secs(1), parse::decimal_seconds, |duration| {
                duration.as_secs_f64().to_string()
            });
        let log = read_log(&mut reader);
        let mut refusals = Vec::new();
        let pd = Arc::new(read_pd(&mut reader, &mut refusals));
        let max_sessions = reader.value("AIBRIX_TOKEN_LOAD_MAX_SESSIONS", 100_000, parse::sessions, usize::to_string);
        let explain = reader.value("TANDEM_EXPLAIN", false, parse::boolean, bool::to_string);
        let trt_machine_id = read_machine_id(&mut reader, &mut refusals);
        let addressing = reader.choice(
            "TANDEM_ADDRESSING",
            Addressing::TargetPod,
            &[("target-pod", Addressing::TargetPod), ("destination-endpoint", Addressing::DestinationEndpoint)],
        );
        let ejection = read_ejection(&mut reader);
        let limits = limits::read(&mut reader);
        let drain = Drain {
            propagation: reader.value(
                "TANDEM_DRAIN_PROPAGATION_SECONDS",
                Duration::from_secs(5),
                parse::seconds_or_zero,
                secs,
            ),
            timeout: reader.value("TANDEM_DRAIN_TIMEOUT_SECONDS", Duration::from_mins(5), parse::seconds_or_zero, secs),
        };
        let scrape = read_scrape(&mut reader);
        let prefix = read_prefix(&mut reader);
        let engine_auth = engine_auth::read(&mut reader);
        let api = api::read(&mut reader);
        let tls = tls::read(&mut reader, &mut refusals);
        let plane = plane::read(&mut reader);
        let kubernetes = kubernetes::read(&mut reader);
        let models = models::read(&mut reader);
        let named = reader.raw("POD_NAME").is_some();
        let otel = otel::read(&mut reader, (&gateway_pod, named));
        let notes = carried::notes(&reader, &prefix, &plane);
        reader.report.notes.extend(notes);
        reader.report_inert();
        if !refusals.is_empty() {
            return Err(Refusal { reasons: refusals });
        }
        let knobs = Knobs {
            gateway_pod,
            routing_algorithm,
            auth_bearer_token,
            disable_rate_limiting,
            engine_auth,
            admin_token,
            ttft_threshold,
            log,
            pd,
            max_sessions,
            explain,
            trt_machine_id,
            addressing,
            ejection,
            limits,
            drain,
            scrape,
            prefix,
            api,
            tls,
            plane,
            kubernetes,
            models,
            otel,
        };
        Ok((knobs, reader.report))
    }
}

fn read_log(reader: &mut Reader<'_>) -> LogKnobs {
    let filter = |text: &str| match tracing_subscriber::EnvFilter::try_new(text) {
        Ok(_) => Ok(text.to_owned()),
        Err(_) => Err("a log filter such as info or tandem=debug,warn"),
    };
    LogKnobs {
        filter: reader.value("TANDEM_LOG", "info".to_owned(), filter, String::clone),
        format: reader.choice(
            "TANDEM_LOG_FORMAT",
            LogFormat::Text,
            &[("text", LogFormat::Text), ("json", LogFormat::Json)],
        ),
    }
}

fn read_pd(reader: &mut Reader<'_>, refusals: &mut Vec<String>) -> PdKnobs {
    let default = PdKnobs::default();
    let (watchdog, abort) = decode::read(reader);
    let number =
        |reader: &mut Reader<'_>, name, default| reader.value(name, default, parse::positive_number, f64::to_string);
    PdKnobs {
        prompt_length_bucketing: reader.value(
            "AIBRIX_PROMPT_LENGTH_BUCKETING",
            default.prompt_length_bucketing,
            parse::boolean,
            bool::to_string,
        ),
        bucket_serve: reader.value("AIBRIX_BUCKET_SERVE", default.bucket_serve, parse::boolean, bool::to_string),
        bucket_serve_mode: reader.value(
            "AIBRIX_BUCKET_SERVE_MODE",
            default.bucket_serve_mode,
            parse::bucket_serve_mode,
            |mode| mode.name().to_owned(),
        ),
        prefill_request_timeout: reader.value(
            "AIBRIX_PREFILL_REQUEST_TIMEOUT",
            default.prefill_request_timeout,
            parse::seconds,
            secs,
        ),
        prefill_policy: reader.value(
            "AIBRIX_PREFILL_SCORE_POLICY",
            default.prefill_policy,
            parse::prefill_policy,
            |policy| policy.name().to_owned(),
        ),
        decode_policy: reader.value(
            "AIBRIX_DECODE_SCORE_POLICY",
            default.decode_policy,
            parse::decode_policy,
            |policy| policy.name().to_owned(),
        ),
        prefill_imbalance_min_spread: reader.value(
            "AIBRIX_PREFILL_LOAD_IMBALANCE_MIN_SPREAD",
            default.prefill_imbalance_min_spread,
            parse::positive_integer,
            u64::to_string,
        ),
        decode_imbalance_min_spread: number(
            reader,
            "AIBRIX_DECODE_LOAD_IMBALANCE_MIN_SPREAD",
            default.decode_imbalance_min_spread,
        ),
        decode_throughput_min_spread: number(
            reader,
            "AIBRIX_DECODE_THROUGHPUT_IMBALANCE_MIN_SPREAD",
            default.decode_throughput_min_spread,
        ),
        decode_score_ratio: number(reader, "AIBRIX_DECODE_SCORE_RATIO_THRESHOLD", default.decode_score_ratio),
        decode_weight_running: number(reader, "AIBRIX_DECODE_LB_WEIGHT_RUNNING", default.decode_weight_running),
        decode_weight_throughput: number(
            reader,
            "AIBRIX_DECODE_LB_WEIGHT_THROUGHPUT",
            default.decode_weight_throughput,
        ),
        min_match_pct: reader.value("AIBRIX_MIN_MATCH_PCT", default.min_match_pct, parse::percentage, u8::to_string),
        standard_deviation_factor: number(
            reader,
            "AIBRIX_PREFIX_CACHE_STANDARD_DEVIATION_FACTOR",
            default.standard_deviation_factor,
        ),
        token_load_kv_weight: number(reader, "AIBRIX_TOKEN_LOAD_KV_WEIGHT", default.token_load_kv_weight),
        token_load_request_cost: reader.value(
            "AIBRIX_TOKEN_LOAD_REQUEST_COST",
            default.token_load_request_cost,
            parse::positive_tokens,
            u64::to_string,
        ),
        token_load_ttl: reader.value("AIBRIX_TOKEN_LOAD_TTL_SECONDS", default.token_load_ttl, parse::seconds, secs),
        token_load_session_ttl: reader.value(
            "AIBRIX_TOKEN_LOAD_SESSION_TTL_SECONDS",
            default.token_load_session_ttl,
            parse::seconds_or_zero,
            secs,
        ),
        decode_output_growth: reader.value(
            "AIBRIX_DECODE_TOKEN_LOAD_OUTPUT_GROWTH",
            default.decode_output_growth,
            parse::boolean,
            bool::to_string,
        ),
        hybrid_cache_load_factor: reader.value(
            "AIBRIX_HYBRID_CACHE_LOAD_FACTOR",
            default.hybrid_cache_load_factor,
            parse::share,
            f64::to_string,
        ),
        kv_lease: reader.optional("TANDEM_KV_LEASE_SECONDS", parse::seconds_or_zero, secs),
        handoff_deadline: reader.value(
            "TANDEM_HANDOFF_DEADLINE_SECONDS",
            default.handoff_deadline,
            parse::decimal_seconds,
            |time| time.as_secs_f64().to_string(),
        ),
        watchdog,
        abort,
        trt_generation_first: reader.choice(
            "AIBRIX_TRT_SCHEDULE_STYLE",
            default.trt_generation_first,
            &[("context_first", false), ("generation_first", true)],
        ),
        mooncake_port: reader.value(
            "AIBRIX_MOONCAKE_BOOTSTRAP_PORT",
            default.mooncake_port,
            parse::port,
            u16::to_string,
        ),
        kv_connector: read_connector(reader, default.kv_connector, refusals),
        strategies: strategies::read(reader),
    }
}

/// The reference fails every request on an unknown connector, which is better told at the start.
fn read_connector(reader: &mut Reader<'_>, default: KvConnector, refusals: &mut Vec<String>) -> KvConnector {
    const NAME: &str = "AIBRIX_KV_CONNECTOR_TYPE";
    match reader.raw(NAME).as_deref() {
        None | Some("shfs" | "nixl" | "mooncake") => {}
        Some(other) => refusals.push(format!("{NAME} is {:?}, but must be shfs, nixl or mooncake", shorten(other))),
    }
    let choices = [("shfs", KvConnector::Shfs), ("nixl", KvConnector::Nixl), ("mooncake", KvConnector::Mooncake)];
    reader.choice(NAME, default, &choices)
}

/// Two replicas that share pods must not share this number, so a number that cannot be meant stops the start.
fn read_machine_id(reader: &mut Reader<'_>, refusals: &mut Vec<String>) -> Option<u16> {
    const NAME: &str = "AIBRIX_TRT_MACHINE_ID";
    const EXPECTED: &str = "a whole number from 0 to 1023";
    if let Some(text) = reader.raw(NAME)
        && text.parse::<u16>().ok().is_none_or(|id| id > 1023)
    {
        refusals.push(format!("{NAME} is {:?}, but must be {EXPECTED}", shorten(&text)));
    }
    reader.optional(NAME, |text| text.parse().map_err(|_| EXPECTED), u16::to_string)
}

fn read_ejection(reader: &mut Reader<'_>) -> Ejection {
    let default = Ejection::default();
    let time = |reader: &mut Reader<'_>, name, default| reader.value(name, default, parse::seconds, secs);
    Ejection {
        failures: reader.value("TANDEM_EJECTION_FAILURES", default.failures, parse::count_or_zero, u32::to_string),
        base: time(reader, "TANDEM_EJECTION_SECONDS", default.base),
        max: time(reader, "TANDEM_EJECTION_MAX_SECONDS", default.max),
    }
}

fn read_scrape(reader: &mut Reader<'_>) -> ScrapeKnobs {
    let time = |reader: &mut Reader<'_>, name, default| {
        reader.value(name, Duration::from_millis(default), parse::milliseconds, millis)
    };
    ScrapeKnobs {
        interval: time(reader, "AIBRIX_POD_METRIC_REFRESH_INTERVAL_MS", 50),
        timeout: time(reader, "TANDEM_SCRAPE_TIMEOUT_MS", 1000),
        max_age: time(reader, "TANDEM_METRIC_MAX_AGE_MS", 3000),
        max_bytes: reader.value("TANDEM_MAX_SCRAPE_BYTES", 8 << 20, parse::positive_size, usize::to_string),
        labels: reader.choice("TANDEM_METRIC_LABELS", MetricLabels::default(), &MetricLabels::CHOICES),
    }
}

fn read_prefix(reader: &mut Reader<'_>) -> PrefixKnobs {
    PrefixKnobs {
        tokenizer: reader.choice_or_later(
            "AIBRIX_PREFIX_CACHE_TOKENIZER_TYPE",
            Tokenizer::Character,
            &[("character", Tokenizer::Character), ("tiktoken", Tokenizer::Tiktoken)],
            &["remote"],
        ),
        block_size: reader.value("AIBRIX_PREFIX_CACHE_BLOCK_SIZE", 128, parse::positive_size, usize::to_string),
        hash_seed: reader.optional("AIBRIX_PREFIX_CACHE_HASH_SEED", parse::any_u64, u64::to_string),
        budget_bytes: reader.value("TANDEM_PREFIX_CACHE_BYTES", 256 << 20, parse::positive_size, usize::to_string),
        max_blocks: reader.optional("AIBRIX_PREFIX_CACHE_BLOCK_NUMBER", parse::positive_size, usize::to_string),
        max_idle: reader.value(
            "AIBRIX_PREFIX_CACHE_EVICTION_DURATION_MINS",
            Duration::from_mins(20),
            parse::minutes,
            |duration| (duration.as_secs() / 60).to_string(),
        ),
    }
}
