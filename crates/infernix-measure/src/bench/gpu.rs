//! What `nvidia-smi` says of the cards: what a figure was measured on, and whether the clocks held.

use serde_json::{Value, json};
use std::process::Command;

/// Fields asked for, in the order of [`Gpu::parse`].
const QUERY: &str = "name,driver_version,memory.total,memory.used,power.limit,power.draw,clocks.sm,clocks.max.sm,\
clocks.mem,pcie.link.gen.current,pcie.link.width.current,temperature.gpu";

/// Clocks further apart than this share of the higher one have moved.
const MOVED: f64 = 0.05;

/// A card at one moment. What the driver does not tell is absent.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Gpu {
    /// Product name.
    pub name: String,
    /// Version of its driver.
    pub driver: String,
    /// Memory, MiB.
    pub memory_mib: Option<u64>,
    /// Memory in use by all processes, MiB.
    pub memory_used_mib: Option<u64>,
    /// Power limit, W.
    pub power_limit_w: Option<f64>,
    /// Power drawn, W.
    pub power_w: Option<f64>,
    /// Clock of the multiprocessors, MHz.
    pub sm_mhz: Option<u64>,
    /// Its maximum.
    pub sm_max_mhz: Option<u64>,
    /// Memory clock, MHz.
    pub memory_mhz: Option<u64>,
    /// PCIe generation in use.
    pub link_generation: Option<u64>,
    /// PCIe lanes in use.
    pub link_width: Option<u64>,
    /// Temperature, °C.
    pub temperature_c: Option<u64>,
}

impl Gpu {
    /// The cards of this machine now; none where there is no driver.
    pub fn all() -> Vec<Gpu> {
        let query = format!("--query-gpu={QUERY}");
        let output = Command::new("nvidia-smi").args([&query, "--format=csv,noheader,nounits"]).output();
        match output {
            Ok(o) if o.status.success() => Gpu::parse(&String::from_utf8_lossy(&o.stdout)),
            _ => Vec::new(),
        }
    }

    /// Reads the program's lines, one a card; a line of another form is left out.
    pub fn parse(text: &str) -> Vec<Gpu> {
        let fields = QUERY.split(',').count();
        let card = |line: &str| {
            let cells: Vec<&str> = line.split(',').map(str::trim).collect();
            if cells.len() != fields {
                return None;
            }
            // `[N/A]`, `[Not Supported]` and the like are no numbers.
            let whole = |i: usize| cells[i].parse::<u64>().ok();
            let real = |i: usize| cells[i].parse::<f64>().ok().filter(|v| v.is_finite());
            Some(Gpu {
                name: cells[0].to_owned(),
                driver: cells[1].to_owned(),
                memory_mib: whole(2),
                memory_used_mib: whole(3),
                power_limit_w: real(4),
                power_w: real(5),
                sm_mhz: whole(6),
                sm_max_mhz: whole(7),
                memory_mhz: whole(8),
                link_generation: whole(9),
                link_width: whole(10),
                temperature_c: whole(11),
            })
        };
        text.lines().filter_map(card).collect()
    }

    /// An object of `machine.gpus`.
    pub fn to_json(&self) -> Value {
        json!({
            "name": self.name, "driver": self.driver, "memory_mib": self.memory_mib,
            "memory_used_mib": self.memory_used_mib, "power_limit_w": self.power_limit_w, "power_w": self.power_w,
            "sm_mhz": self.sm_mhz, "sm_max_mhz": self.sm_max_mhz, "memory_mhz": self.memory_mhz,
            "link_generation": self.link_generation, "link_width": self.link_width,
            "temperature_c": self.temperature_c,
        })
    }
}

/// Whether the clocks or power limits of the cards differ between moments that should be alike, and how.
pub fn moved(moments: &[Vec<Gpu>]) -> Option<String> {
    let cards = moments.iter().map(Vec::len).min().unwrap_or(0);
    (0..cards).find_map(|card| {
        let values = |f: &dyn Fn(&Gpu) -> Option<f64>| -> Vec<f64> {
            moments.iter().filter_map(|m| f(&m[card])).collect()
        };
        let ranges = [
            ("clock", "MHz", values(&|g| g.sm_mhz.map(|v| v as f64))),
            ("power limit", "W", values(&|g| g.power_limit_w)),
        ];
        ranges.into_iter().find_map(|(what, unit, v)| {
            let low = v.iter().copied().fold(f64::INFINITY, f64::min);
            let high = v.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            (high - low > MOVED * high)
                .then(|| format!("the {what} of GPU {card} went from {low} to {high} {unit}"))
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Printed by driver 580.159.04 on a server with one H200, and by a driver of a laptop that tells less.
    const H200: &str = include_str!("../../tests/nvidia_smi_h200.csv");
    const LAPTOP: &str =
        "NVIDIA GeForce RTX 4050 Laptop GPU, 551.23, 6141, 0, [N/A], 1.92, 210, 3105, 405, 1, 8, 41\n";

    #[test]
    fn a_cards_line_becomes_its_figures_and_what_is_not_told_is_absent() {
        let cards = Gpu::parse(H200);
        assert_eq!(cards.len(), 1);
        let card = &cards[0];
        assert!(card.name.contains("H200") && card.driver.starts_with("580."), "{card:?}");
        assert!(card.memory_mib > Some(140_000) && card.power_limit_w == Some(700.0), "{card:?}");
        assert!(card.sm_mhz.is_some() && card.link_width == Some(16), "{card:?}");
        let laptop = &Gpu::parse(LAPTOP)[0];
        assert_eq!((laptop.power_limit_w, laptop.power_w), (None, Some(1.92)));
        assert_eq!((laptop.link_generation, laptop.link_width), (Some(1), Some(8)));
        assert!(laptop.to_json()["power_limit_w"].is_null());
        assert!(Gpu::parse("").is_empty());
        assert!(
            Gpu::parse("NVIDIA-SMI has failed because it couldn't communicate with the driver\n").is_empty()
        );
    }

    #[test]
    fn clocks_that_moved_are_named_with_their_range() {
        let at = |mhz| vec![Gpu { sm_mhz: Some(mhz), power_limit_w: Some(700.0), ..Gpu::default() }];
        assert_eq!(moved(&[at(1980), at(1935), at(1980)]), None);
        let text = moved(&[at(1980), at(1410)]).unwrap();
        assert!(text.contains("1410") && text.contains("1980"), "{text}");
        let mut capped = at(1980);
        capped[0].power_limit_w = Some(400.0);
        assert!(moved(&[at(1980), capped]).unwrap().contains("power limit"));
        assert_eq!(moved(&[]), None);
        assert_eq!(moved(&[Vec::new(), at(1)]), None);
    }
}
