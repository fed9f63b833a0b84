//! What a report says about the machine, and the time of day.

use super::gpu::Gpu;
use std::fs;
use std::time::{SystemTime, UNIX_EPOCH};

/// The processor as the kernel describes it; unknown parts are empty.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Machine {
    /// Model name.
    pub cpu: String,
    /// Logical processors this process may use.
    pub cores: usize,
    /// Instruction sets that the CPU backend dispatches on, as far as present.
    pub features: Vec<&'static str>,
    /// Bytes of main memory.
    pub memory: u64,
    /// Operating system and kernel version.
    pub system: String,
    /// NVIDIA cards, as they stood when this was made.
    pub gpus: Vec<Gpu>,
}

impl Machine {
    /// This machine.
    pub fn this() -> Machine {
        let info = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
        Machine {
            cpu: field(&info, "model name").unwrap_or_default().to_owned(),
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            features: features(field(&info, "flags").unwrap_or_default()),
            memory: memory("MemTotal"),
            system: format!("{} {}", std::env::consts::OS, release.trim()).trim().to_owned(),
            gpus: Gpu::all(),
        }
    }

    /// The object `machine` of reports.
    pub fn to_json(&self) -> serde_json::Value {
        let mut out = serde_json::json!({
            "cpu": self.cpu,
            "cores": self.cores,
            "features": self.features,
            "memory_bytes": self.memory,
            "system": self.system,
        });
        if !self.gpus.is_empty() {
            out["gpus"] = self.gpus.iter().map(Gpu::to_json).collect();
        }
        out
    }
}

/// Bytes of memory that could be taken without swapping; 0 where unknown.
pub fn available_memory() -> u64 {
    memory("MemAvailable")
}

/// Bytes that this process's control group allows and has in use; `None` where nothing limits it.
pub fn group_memory() -> Option<(u64, u64)> {
    let number = |path: &str| -> Option<u64> { fs::read_to_string(path).ok()?.trim().parse().ok() };
    let of = |limit: &str, used: &str| Some((number(limit)?, number(used)?));
    let v2 = of("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current");
    let v1 =
        || of("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes");
    // The first version states a number near 2^63 where there is no limit.
    v2.or_else(v1).filter(|(limit, _)| *limit < 1 << 62)
}

/// Bytes of memory that this process may still take: the machine's, or its control group's where that allows less; 0 where
/// unknown.
pub fn free_memory() -> u64 {
    let machine = available_memory();
    group_memory().map_or(machine, |(limit, used)| limit.saturating_sub(used).min(machine))
}

fn memory(key: &str) -> u64 {
    let info = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let kib = field(&info, key).and_then(|v| v.split_whitespace().next()?.parse::<u64>().ok());
    kib.unwrap_or(0) << 10
}

fn field<'a>(text: &'a str, key: &str) -> Option<&'a str> {
    text.lines().find_map(|l| {
        let (name, value) = l.split_once(':')?;
        (name.trim() == key).then(|| value.trim())
    })
}

fn features(flags: &str) -> Vec<&'static str> {
    const KNOWN: [&str; 9] = [
        "avx2",
        "fma",
        "f16c",
        "avx512f",
        "avx512bw",
        "avx512vbmi",
        "avx512_vnni",
        "avx512_bf16",
        "amx_bf16",
    ];
    KNOWN.into_iter().filter(|k| flags.split_whitespace().any(|f| f == *k)).collect()
}

/// Seconds since 1970.
pub fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs())
}

/// `2026-11-30T07:12:00Z`, by the civil-from-days formula for the proleptic Gregorian calendar.
pub fn utc(seconds: u64) -> String {
    let (days, rest) = (seconds / 86_400 + 719_468, seconds % 86_400);
    let (era, day) = (days / 146_097, days % 146_097);
    let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let date = day - (153 * month + 2) / 5 + 1;
    let month = if month < 10 { month + 3 } else { month - 9 };
    let year = era * 400 + year + u64::from(month <= 2);
    format!("{year:04}-{month:02}-{date:02}T{:02}:{:02}:{:02}Z", rest / 3600, rest / 60 % 60, rest % 60)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_those_of_the_calendar() {
        assert_eq!(utc(0), "1970-01-01T00:00:00Z");
        assert_eq!(utc(951_782_400), "2000-02-29T00:00:00Z");
        assert_eq!(utc(1_709_251_199), "2024-02-29T23:59:59Z");
        assert_eq!(utc(1_796_022_000), "2026-11-30T07:00:00Z");
    }

    #[test]
    fn fields_and_features_come_from_the_kernels_text() {
        let text = "processor\t: 0\nmodel name\t: AMD EPYC\nflags\t\t: fpu avx2 avx512f avx512_bf16\n";
        assert_eq!(field(text, "model name"), Some("AMD EPYC"));
        assert_eq!(features(field(text, "flags").unwrap()), ["avx2", "avx512f", "avx512_bf16"]);
        assert_eq!(field(text, "nothing"), None);
    }
}
