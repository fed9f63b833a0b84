//! Tile products: dense linears and grouped experts against exact sums, then their rates.

use super::Run;
use super::experts::{Layer, layer, permutation, zipf_ids};
use super::linear::{linear_share, sample};
use crate::driver::{Args, DeviceBuffer};
use crate::error::Result;
use crate::kernels::linear::{Out, WeightFormat};
use crate::kernels::tile::{Epilogue, ExpertPlanes, JobLists, Quantise, Sort, Sorted, Tile, TileFormat};
use crate::oracle::num::{bf16, bf16_half_ulp, parallel};
use crate::oracle::{Rng, Words, fp4, w4a4};

/// Both instances where the device has both.
fn instances(run: &Run) -> &'static [bool] {
    if run.dev.info().capability == 90 { &[true, false] } else { &[false] }
}

fn label(wgmma: bool) -> &'static str {
    if wgmma { "wgmma" } else { "mma" }
}

/// Bounds at real and odd shapes, BF16 and FP32 out.
pub(super) fn dense(run: &mut Run) -> Result<()> {
    for f in WeightFormat::ALL {
        for (n, k, rows) in [
            (2560usize, 2560usize, 300usize),
            (320, 10240, 129),
            (1280, 320, 257),
            (48, 2560, 64),
            (37, 1088, 5),
            (300, 96, 70),
        ] {
            let w = Words::random(&mut run.rng, f, n, k, if f == WeightFormat::Bf16 { 32 } else { 64 });
            let lin = w.upload(&run.dev)?;
            let (xp, yp) = (k + 8, n + 3);
            let x = run.rng.bf16(rows * xp, 1.0);
            let dx = run.dev.upload(&x)?;
            let some = sample(&mut run.rng, n, 80);
            for &wg in instances(run) {
                let t = Tile::with(&run.dev, TileFormat::Rows(f), wg)?;
                let packed = run.dev.alloc(Tile::packed_bytes(rows, k))?;
                let case = format!("{} {} {n}x{k}, {rows} rows", label(wg), f.tag());
                t.pack(&run.stream, dx.ptr(), xp, rows, k, packed.ptr(), false)?;
                for out in [Out::Bf16, Out::F32] {
                    let f32_out = out == Out::F32;
                    let y = run.dev.alloc(rows * yp * 4)?;
                    t.dense(&run.stream, &lin, packed.ptr(), rows, y.ptr(), yp, out, true)?;
                    run.stream.synchronize()?;
                    let got: Vec<f64> = if f32_out {
                        y.read::<f32>(0, rows * yp)?.into_iter().map(f64::from).collect()
                    } else {
                        y.read::<u16>(0, rows * yp)?.into_iter().map(|w| f64::from(bf16(w))).collect()
                    };
                    let share = linear_share(&w, &some, &x, xp, k, rows, f32_out, |c, r| got[c * yp + r]);
                    run.check("tile", format!("{case}, {out:?}"), share, false);
                    let unwritten = (0..rows)
                        .flat_map(|t| (0..n).map(move |r| t * yp + r))
                        .filter(|i| got[*i].is_nan())
                        .count();
                    // The gaps of the pitch stay as they were.
                    let over = (0..rows)
                        .flat_map(|t| (n..yp).map(move |r| t * yp + r))
                        .filter(|i| !got[*i].is_nan())
                        .count();
                    run.check(
                        "tile",
                        format!("{case}, {out:?}: all written, nothing else"),
                        (unwritten + over) as f64,
                        true,
                    );
                }
            }
        }
    }
    Ok(())
}

/// Experts as the oracle sees them.
trait Bank: Sync {
    /// Row of gate_up (2j gate, 2j + 1 up) or down of expert `e`, without alpha.
    fn row(&self, e: usize, down: bool, r: usize) -> Vec<f64>;
    /// Factor of that row.
    fn alpha(&self, e: usize, down: bool, r: usize) -> f64;
    /// Products that a value takes.
    fn products(&self) -> usize {
        1
    }
}

struct Records<'a> {
    layer: &'a Layer,
    h: usize,
    i: usize,
}

impl Bank for Records<'_> {
    fn row(&self, e: usize, down: bool, r: usize) -> Vec<f64> {
        let rec = &self.layer.records[e % self.layer.records.len()];
        if down {
            w4a4::row(rec, 2 * self.i / 16 * (self.h / 16) * 144, r, self.i)
        } else {
            w4a4::row(rec, 0, r, self.h)
        }
    }
    fn alpha(&self, e: usize, down: bool, r: usize) -> f64 {
        let s = &self.layer.scales[e];
        let a = f64::from(s.alpha[if down { 2 } else { r % 2 }]);
        if s.divisor { 1.0 / a } else { a }
    }
}

/// Gate, up and down of each expert as separate matrices.
struct Planes {
    words: Vec<[Words; 3]>,
    k_pad: [usize; 2],
    _bufs: Vec<DeviceBuffer>,
    tabs: [DeviceBuffer; 2],
    half: usize,
}

impl Planes {
    fn random(run: &mut Run, f: WeightFormat, e: usize, h: usize, i: usize) -> Result<Self> {
        let (mut words, mut bufs) = (vec![], vec![]);
        let mut tabs = [vec![0u64; 3 * e], vec![0u64; 3 * e]];
        for x in 0..e {
            // As stored: integers in whole 128 k.
            let align = if matches!(f, WeightFormat::Bf16 | WeightFormat::Fp8Row) { f.step() } else { 128 };
            let w = [(i, h), (i, h), (h, i)].map(|(n, k)| {
                if f == WeightFormat::Fp8Block {
                    Words::random_unpadded(&mut run.rng, n, k)
                } else {
                    Words::random(&mut run.rng, f, n, k, align)
                }
            });
            // gate and up rows together, down alone; 256 bytes between planes.
            for (t, parts) in [(0usize, &w[..2]), (1, &w[2..])] {
                for plane in 0..3 {
                    let bytes: Vec<u8> = parts.iter().flat_map(|w| w.planes()[plane].to_vec()).collect();
                    if !bytes.is_empty() {
                        let b = run.dev.upload(&bytes)?;
                        tabs[t][plane * e + x] = b.ptr();
                        bufs.push(b);
                    }
                }
            }
            words.push(w);
        }
        let k_pad = [words[0][0].k_pad(), words[0][2].k_pad()];
        let tabs = [run.dev.upload(&tabs[0])?, run.dev.upload(&tabs[1])?];
        Ok(Planes { words, k_pad, _bufs: bufs, tabs, half: i })
    }
}

impl Bank for Planes {
    fn row(&self, e: usize, down: bool, r: usize) -> Vec<f64> {
        if down { self.words[e][2].row(r) } else { self.words[e][r % 2].row(r / 2) }
    }
    fn alpha(&self, _: usize, _: bool, _: usize) -> f64 {
        1.0
    }
}

/// One call's routing and device buffers.
struct Call {
    ids: Vec<i32>,
    top: usize,
    list: Vec<i32>,
    max_jobs: usize,
    places: usize,
    sorted: Sorted,
    jobs: DeviceBuffer,
    count: DeviceBuffer,
    _bufs: Vec<DeviceBuffer>,
}

fn route(run: &mut Run, e: usize, top: usize, ids: Vec<i32>, width: usize) -> Result<Call> {
    let rows = ids.len() / top;
    let picks = ids.len();
    let sort = Sort::with_width(&run.dev, e, top, width)?;
    let dids = run.dev.upload(&ids)?;
    let a = |n: usize| run.dev.alloc(n * 4);
    let max_jobs = sort.max_jobs(rows);
    let (jobs, count, base, list, slot) = (a(max_jobs * 4)?, a(2)?, a(e + 1)?, a(picks)?, a(picks)?);
    let sorted =
        Sorted { jobs: jobs.ptr(), count: count.ptr(), base: base.ptr(), list: list.ptr(), slot: slot.ptr() };
    sort.launch(&run.stream, dids.ptr(), rows, sorted, false)?;
    run.stream.synchronize()?;
    let mut want: Vec<i32> = (0..picks as i32).collect();
    want.sort_by_key(|p| ids[*p as usize]);
    let (gl, gs): (Vec<i32>, Vec<i32>) = (list.read(0, picks)?, slot.read(0, picks)?);
    let gc: Vec<i32> = count.read(0, 2)?;
    let mut bad = (0..picks).filter(|p| gl[*p] != want[*p] || gs[want[*p] as usize] != *p as i32).count();
    let mut jobs_want = vec![];
    let (mut first, mut padded) = (0, 0);
    for x in 0..e as i32 {
        let n = ids.iter().filter(|i| **i == x).count();
        for k in (0..n).step_by(width) {
            jobs_want.extend([x, (first + k) as i32, width.min(n - k) as i32, (padded + k) as i32]);
        }
        first += n;
        padded += n.div_ceil(8) * 8;
    }
    let gj: Vec<i32> = jobs.read(0, jobs_want.len())?;
    bad += gj.iter().zip(&jobs_want).filter(|(a, b)| a != b).count();
    bad += usize::from(gc != [jobs_want.len() as i32 / 4, picks as i32]);
    run.check("sort", format!("{e} experts, {rows} rows of {top}, width {width}"), bad as f64, true);
    let places = sort.max_places(rows);
    let bufs = vec![base, list, slot];
    Ok(Call { ids, top, list: want, max_jobs, places, sorted, jobs, count, _bufs: bufs })
}

/// Worst error over bound of sampled outputs `y[place][row]`: inputs `x(place)`.
fn share(
    bank: &dyn Bank,
    call: &Call,
    rng: &mut Rng,
    down: bool,
    n: usize,
    x: impl Fn(usize) -> Vec<f64> + Sync,
    y: &[u16],
) -> f64 {
    let picks = call.ids.len();
    let places: Vec<usize> =
        if picks <= 60 { (0..picks).collect() } else { (0..60).map(|_| rng.below(picks)).collect() };
    let rows = sample(rng, n, 60);
    let worst = parallel(places.len(), |p| {
        let place = places[p];
        let e = call.ids[call.list[place] as usize] as usize;
        let xv = x(place);
        let mut worst = 0f64;
        for &r in &rows {
            let (mut s, mut a) = (0f64, 0f64);
            for (w, x) in bank.row(e, down, r).iter().zip(&xv) {
                s += w * x;
                a += (w * x).abs();
            }
            let al = bank.alpha(e, down, r);
            let (s, a) = (s * al, a * al.abs());
            let terms = (bank.products() * xv.len()) as f64;
            let bound = terms * 2f64.powi(-24) * a + bf16_half_ulp(s) + s.abs() * 2f64.powi(-22);
            let got = f64::from(bf16(y[place * n + r]));
            worst = worst.max(if got.is_finite() { (got - s).abs() / bound } else { f64::INFINITY });
        }
        worst
    });
    worst.into_iter().fold(0.0, f64::max)
}

/// Both products of one layer, checked stage by stage. `quantise`: W4A4 with these input scales.
#[expect(clippy::too_many_arguments, reason = "what one case is made of")]
fn layer_case(
    run: &mut Run,
    case: &str,
    bank: &dyn Bank,
    f: TileFormat,
    wg: bool,
    up: ExpertPlanes,
    down: ExpertPlanes,
    call: &Call,
    x: &[u16],
    quantise: Option<(&[w4a4::Scales], u64)>,
) -> Result<Vec<u16>> {
    let (h, i) = (up.k, down.k);
    let t = Tile::with(&run.dev, f, wg)?;
    let picks = call.ids.len();
    let q = |down: bool| quantise.map(|(s, input)| Quantise { input, divisor: s[0].divisor, down });
    let dx = run.dev.upload(x)?;
    let packed = run.dev.alloc(Tile::packed_bytes(call.places, h.max(i)))?;
    let (yr, mid, y) =
        (run.dev.alloc(picks * 4 * i)?, run.dev.alloc(picks * 2 * i)?, run.dev.alloc(picks * 2 * h)?);
    let (s, o) = (&run.stream, call.sorted);
    t.pack_sorted(s, dx.ptr(), h, h, o, call.top, call.max_jobs, q(false), packed.ptr(), true)?;
    t.grouped(s, &up, o, packed.ptr(), yr.ptr(), 2 * i, Epilogue::Rows, true)?;
    t.grouped(s, &up, o, packed.ptr(), mid.ptr(), i, Epilogue::SwiGlu, true)?;
    t.pack_sorted(s, mid.ptr(), i, i, o, 0, call.max_jobs, q(true), packed.ptr(), true)?;
    t.grouped(s, &down, o, packed.ptr(), y.ptr(), h, Epilogue::Rows, true)?;
    run.stream.synchronize()?;
    let gr: Vec<u16> = yr.read(0, picks * 2 * i)?;
    let gm: Vec<u16> = mid.read(0, picks * i)?;
    let gy: Vec<u16> = y.read(0, picks * h)?;
    let input = |words: &[u16], place: usize, down: bool| -> Vec<f64> {
        let e = call.ids[call.list[place] as usize] as usize;
        match quantise {
            Some((s, _)) => {
                w4a4::quantise(words, s[e].input[if down { 2 } else { 0 }], s[e].divisor).values()
            }
            None => words.iter().map(|w| f64::from(bf16(*w))).collect(),
        }
    };
    let mut rng = run.rng.clone();
    let row_of = |place: usize| call.list[place] as usize / call.top;
    let w = share(bank, call, &mut rng, false, 2 * i, |p| input(&x[row_of(p) * h..][..h], p, false), &gr);
    run.check("tile experts gate/up", case.into(), w, false);
    let bad = (0..picks * i).filter(|j| gm[*j] != w4a4::swiglu(bf16(gr[2 * j]), bf16(gr[2 * j + 1]))).count();
    run.check("tile experts swiglu", format!("{case}: bits of the stored gate and up"), bad as f64, true);
    let w = share(bank, call, &mut rng, true, h, |p| input(&gm[p * i..][..i], p, true), &gy);
    run.check("tile experts down", case.into(), w, false);
    if let Some((scales, _)) = quantise {
        // Against the exact integers: rounding differs where the FP32 sum crosses a BF16 boundary, rarely.
        let some: Vec<usize> = (0..picks).step_by(picks.div_ceil(8)).collect();
        let differ = parallel(some.len(), |k| {
            let p = some[k];
            let e = call.ids[call.list[p] as usize] as usize;
            let xr = w4a4::quantise(&x[row_of(p) * h..][..h], scales[e].input[0], scales[e].divisor).values();
            (0..2 * i)
                .filter(|r| {
                    let s: f64 = bank.row(e, false, *r).iter().zip(&xr).map(|(a, b)| a * b).sum();
                    let al = scales[e].alpha[r % 2];
                    let v = if scales[e].divisor { s as f32 / al } else { s as f32 * al };
                    crate::oracle::num::f32_to_bf16(v) != gr[p * 2 * i + r]
                })
                .count()
        });
        let part = differ.iter().sum::<usize>() as f64 / (some.len() * 2 * i) as f64;
        run.check(
            "tile experts W4A4",
            format!("{case}: outputs that differ from the exact ones, of 1 %"),
            part / 0.01,
            false,
        );
    }
    let unwritten = gr.iter().chain(&gm).chain(&gy).filter(|w| **w == 0xFFFF).count();
    run.check("tile experts", format!("{case}: all written"), unwritten as f64, true);
    Ok(gy)
}

/// Activations packed for FP4 products: the bytes of the model.
fn packed_fp4(run: &mut Run, l: &Layer, call: &Call, x: &[u16], h: usize) -> Result<()> {
    let pack = run.dev.kernel("pack_fp4", 0)?;
    let dx = run.dev.upload(x)?;
    let out = run.dev.alloc(call.places * h.div_ceil(64) * 36)?;
    let o = call.sorted;
    let args =
        Args::new().ptr(dx.ptr()).ptr(o.jobs).ptr(o.count).ptr(o.list).ptr(l.table.input).ptr(out.ptr());
    let args = args.ints(&[h, h, 0, call.top, 0, usize::from(l.table.divisor)]);
    run.stream.launch(&pack, [h.div_ceil(64) as u32, call.max_jobs as u32, 1], 128, false, &args)?;
    run.stream.synchronize()?;
    let jobs: Vec<i32> = call.jobs.read(0, call.max_jobs * 4)?;
    let counts: Vec<i32> = call.count.read(0, 2)?;
    let mut bad = 0;
    for j in jobs.chunks_exact(4).take(counts[0] as usize) {
        let s = &l.scales[j[0] as usize];
        let rows: Vec<_> = (j[1]..j[1] + j[2])
            .map(|p| {
                let row = call.list[p as usize] as usize / call.top;
                w4a4::quantise(&x[row * h..][..h], s.input[0], s.divisor).words()
            })
            .collect();
        let want = fp4::Packed::new(&rows, h);
        let got: Vec<u8> = out.read(j[3] as usize * h.div_ceil(64) * 36, want.bytes().len())?;
        bad += got.iter().zip(want.bytes()).filter(|(a, b)| a != b).count();
    }
    run.check("pack_fp4", format!("{} picks of {h}", call.ids.len()), bad as f64, true);
    Ok(())
}

/// Grouped experts of every format, W4A4 and 16-bit activations.
pub(super) fn experts(run: &mut Run) -> Result<()> {
    let shapes: &[(usize, usize, usize, usize, usize, bool)] = &[
        (32, 2560, 640, 10, 200, false),
        (64, 2048, 512, 8, 40, true),
        (16, 64, 32, 4, 33, false),
        (8, 80, 48, 2, 700, true),
        (12, 160, 16, 3, 1, false),
    ];
    for &(e, h, i, top, rows, divisor) in shapes {
        let l = layer(run, e, h, i, divisor, 8)?;
        let perm = permutation(&mut run.rng, e);
        let ids: Vec<i32> = (0..rows).flat_map(|_| zipf_ids(&mut run.rng, e, top, 0.8, &perm)).collect();
        let mut x = run.rng.bf16(rows * h, 1.0);
        x[..16].fill(0);
        let bank = Records { layer: &l, h, i };
        let mut tab = vec![0u64; 3 * e];
        tab[..e].copy_from_slice(&l.addresses);
        let up_tab = run.dev.upload(&tab)?;
        tab[..e].iter_mut().for_each(|a| *a += (2 * i / 16 * (h / 16) * 144) as u64);
        let down_tab = run.dev.upload(&tab)?;
        let up = ExpertPlanes {
            tab: up_tab.ptr(),
            experts: e,
            n: 2 * i,
            k: h,
            k_pad: h,
            half: 0,
            alpha: l.table.alpha,
            divisor,
            down: false,
        };
        let down = ExpertPlanes { tab: down_tab.ptr(), n: h, k: i, k_pad: i, down: true, ..up };
        for &wg in instances(run) {
            let call = route(run, e, top, ids.clone(), if wg { 128 } else { 64 })?;
            let one = route(run, e, top, ids[..top].to_vec(), if wg { 128 } else { 64 })?;
            packed_fp4(run, &l, &call, &x, h)?;
            for a4 in [true, false] {
                let q = a4.then_some((&l.scales[..], l.table.input));
                let case = format!(
                    "{} rg16 {} {e} experts {h}/{i}, {rows} rows, divisor {divisor}",
                    label(wg),
                    if a4 { "W4A4" } else { "A16" }
                );
                let all = layer_case(run, &case, &bank, TileFormat::Rg16, wg, up, down, &call, &x, q)?;
                let alone = layer_case(
                    run,
                    &format!("{case}, one alone"),
                    &bank,
                    TileFormat::Rg16,
                    wg,
                    up,
                    down,
                    &one,
                    &x,
                    q,
                )?;
                let mut unequal = 0;
                for (place, pick) in one.list.iter().enumerate() {
                    let at = call.list.iter().position(|p| p == pick).unwrap_or(0);
                    unequal += (0..h).filter(|j| all[at * h + j] != alone[place * h + j]).count();
                }
                run.check(
                    "tile experts",
                    format!("{case}: a row alone has the same bits"),
                    unequal as f64,
                    true,
                );
            }
        }
    }
    use WeightFormat as F;
    for f in [F::Bf16, F::Q4G64, F::Q5G64, F::Q6G64, F::Q8G32, F::Fp8Row, F::Fp8Block, F::Mxfp8] {
        for (e, h, i, top, rows) in [(8usize, 256usize, 128usize, 3usize, 150usize), (4, 192, 80, 2, 9)] {
            let p = Planes::random(run, f, e, h, i)?;
            let ids: Vec<i32> = (0..rows)
                .flat_map(|_| {
                    let perm = permutation(&mut run.rng, e);
                    perm[..top].iter().map(|v| *v as i32).collect::<Vec<_>>()
                })
                .collect();
            let x = run.rng.bf16(rows * h, 1.0);
            let up = ExpertPlanes {
                tab: p.tabs[0].ptr(),
                experts: e,
                n: 2 * i,
                k: h,
                k_pad: p.k_pad[0],
                half: p.half,
                ..ExpertPlanes::default()
            };
            let down = ExpertPlanes {
                tab: p.tabs[1].ptr(),
                n: h,
                k: i,
                k_pad: p.k_pad[1],
                half: 0,
                down: true,
                ..up
            };
            for &wg in instances(run) {
                let call = route(run, e, top, ids.clone(), if wg { 128 } else { 64 })?;
                let case = format!("{} {} {e} experts {h}/{i}, {rows} rows", label(wg), f.tag());
                layer_case(run, &case, &p.untensored(), TileFormat::Rows(f), wg, up, down, &call, &x, None)?;
            }
        }
    }
    parts(run)
}

/// Experts whose values are two BF16 words: gate and up rows, and down rows, of each.
struct Parts {
    words: [Vec<u16>; 2],
    h: usize,
    i: usize,
}

impl Parts {
    fn random(rng: &mut Rng, e: usize, h: usize, i: usize) -> Self {
        // The second 64 of every 128 words are what is left of the first.
        let mut words = || -> Vec<u16> {
            let (first, rest) = (rng.bf16(e * 4 * i * h, 1.0), rng.bf16(e * 4 * i * h, 2f64.powi(-9)));
            (0..first.len()).map(|w| if w % 128 < 64 { first[w] } else { rest[w] }).collect()
        };
        let (gate_up, mut down) = (words(), words());
        down.truncate(e * 2 * h * i);
        Parts { words: [gate_up, down], h, i }
    }
}

impl Bank for Parts {
    fn row(&self, e: usize, down: bool, r: usize) -> Vec<f64> {
        let (n, k) = if down { (self.h, self.i) } else { (2 * self.i, self.h) };
        let stored = if down { r } else { r % 2 * self.i + r / 2 };
        let row = &self.words[usize::from(down)][(e * n + stored) * 2 * k..][..2 * k];
        let value = |w: u16| f64::from(bf16(w));
        (0..k).map(|j| value(row[j / 64 * 128 + j % 64]) + value(row[j / 64 * 128 + j % 64 + 64])).collect()
    }
    fn alpha(&self, _: usize, _: bool, _: usize) -> f64 {
        1.0
    }
    fn products(&self) -> usize {
        2
    }
}

/// Two parts a value, all experts at once and some at a time.
fn parts(run: &mut Run) -> Result<()> {
    for (e, h, i, top, rows, per) in [
        (8usize, 256usize, 128usize, 3usize, 300usize, 3usize),
        (5, 192, 64, 2, 9, 1),
        (4, 64, 320, 1, 70, 4),
    ] {
        let bank = Parts::random(&mut run.rng, e, h, i);
        let bufs = [run.dev.upload(&bank.words[0])?, run.dev.upload(&bank.words[1])?];
        let strides = [8 * i * h, 4 * i * h];
        let tab = |b: usize| -> Vec<u64> { (0..e).map(|x| bufs[b].at(x * strides[b])).collect() };
        let tabs = [run.dev.upload(&tab(0))?, run.dev.upload(&tab(1))?];
        let up = ExpertPlanes {
            tab: tabs[0].ptr(),
            experts: e,
            n: 2 * i,
            k: h,
            k_pad: h,
            half: i,
            ..ExpertPlanes::default()
        };
        let down = ExpertPlanes { tab: tabs[1].ptr(), n: h, k: i, k_pad: i, half: 0, down: true, ..up };
        // The last expert has no picks.
        let ids: Vec<i32> = (0..rows)
            .flat_map(|_| {
                let perm = permutation(&mut run.rng, e - 1);
                perm[..top].iter().map(|v| *v as i32).collect::<Vec<_>>()
            })
            .collect();
        let x = run.rng.bf16(rows * h, 1.0);
        let dx = run.dev.upload(&x)?;
        for &wg in instances(run) {
            let width = if wg { 128 } else { 64 };
            let call = route(run, e, top, ids.clone(), width)?;
            let case = format!("{} parts {e} experts {h}/{i}, {rows} rows", label(wg));
            layer_case(run, &case, &bank, TileFormat::Parts, wg, up, down, &call, &x, None)?;
            let (t, sort) =
                (Tile::with(&run.dev, TileFormat::Parts, wg)?, Sort::with_width(&run.dev, e, top, width)?);
            let picks = ids.len();
            let packed = run.dev.alloc(Tile::packed_bytes(call.places, h))?;
            let (all, y) = (run.dev.alloc(picks * 2 * i)?, run.dev.alloc(picks * 2 * i)?);
            let most = call.max_jobs;
            let [jobs, counts, tab] = JobLists::bytes(e, per, most).map(|b| run.dev.alloc(b));
            let (jobs, counts, tab) = (jobs?, counts?, tab?);
            let lists = JobLists { per, jobs: jobs.ptr(), most, counts: counts.ptr(), tab: tab.ptr() };
            let slab = run.dev.alloc(per * strides[0])?;
            let (s, o) = (&run.stream, call.sorted);
            t.pack_sorted(s, dx.ptr(), h, h, o, top, most, None, packed.ptr(), false)?;
            t.grouped(s, &up, o, packed.ptr(), all.ptr(), i, Epilogue::SwiGlu, true)?;
            sort.lists(s, o, &lists, slab.ptr(), strides[0], true)?;
            run.stream.synchronize()?;
            let want: Vec<u16> = all.read(0, picks * i)?;
            let some = ExpertPlanes { tab: lists.tab, ..up };
            let mut bad = 0;
            for (l, first) in (0..e).step_by(per).enumerate() {
                let live = per.min(e - first);
                run.stream.copy(slab.ptr(), bufs[0].at(first * strides[0]), live * strides[0])?;
                let (s, o) = (&run.stream, lists.list(o, l));
                t.grouped(s, &some, o, packed.ptr(), y.ptr(), i, Epilogue::SwiGlu, false)?;
                run.stream.synchronize()?;
                let got: Vec<u16> = y.read(0, picks * i)?;
                let known = |p: usize| (ids[call.list[p] as usize] as usize) < first + live;
                let want = |j: usize| if known(j / i) { want[j] } else { 0xFFFF };
                bad += (0..picks * i).filter(|j| got[*j] != want(*j)).count();
            }
            let case = format!("{case}: {per} experts at a time, equal bits and no others written");
            run.check("tile experts", case, bad as f64, true);
        }
    }
    Ok(())
}

/// The planes without tensor and row factors, which the grouped products take per expert or not at all.
struct Untensored<'a>(&'a Planes);

impl Planes {
    fn untensored(&self) -> Untensored<'_> {
        Untensored(self)
    }
}

impl Bank for Untensored<'_> {
    fn row(&self, e: usize, down: bool, r: usize) -> Vec<f64> {
        let w = if down { &self.0.words[e][2] } else { &self.0.words[e][r % 2] };
        let f = w.factor(if down { r } else { r / 2 });
        w.row(if down { r } else { r / 2 }).iter().map(|v| v / f).collect()
    }
    fn alpha(&self, _: usize, _: bool, _: usize) -> f64 {
        1.0
    }
}

/// Rates at 8,192 rows: dense linears, then one layer of experts.
pub(super) fn bench(run: &mut Run) -> Result<()> {
    if !run.bench {
        return Ok(());
    }
    use WeightFormat as F;
    let rows = 8192usize;
    for (f, n, k) in [
        (F::Bf16, 16384usize, 2560usize),
        (F::Bf16, 2560, 6144),
        (F::Q8G32, 16384, 2560),
        (F::Q8G32, 2560, 6144),
        (F::Q4G64, 16384, 2560),
        (F::Q6G64, 16384, 2560),
        (F::Nvfp4, 34816, 5120),
        (F::Nvfp4, 5120, 17408),
        (F::Fp8Row, 16384, 2560),
        (F::Fp8Block, 16384, 2560),
        (F::Mxfp8, 16384, 2560),
    ] {
        let lin = Words::random(&mut run.rng, f, n, k, 64).upload(&run.dev)?;
        let x = run.dev.upload(&run.rng.bf16(rows * k, 1.0))?;
        let y = run.dev.alloc(rows * n * 2)?;
        let packed = run.dev.alloc(Tile::packed_bytes(rows, k))?;
        for &wg in instances(run) {
            let t = Tile::with(&run.dev, TileFormat::Rows(f), wg)?;
            t.pack(&run.stream, x.ptr(), k, rows, k, packed.ptr(), false)?;
            let us =
                run.time(1, |_| t.dense(&run.stream, &lin, packed.ptr(), rows, y.ptr(), n, Out::Bf16, true))?;
            run.timed_flops(
                "tile",
                format!("{} {} {n}x{k}, {rows} rows", label(wg), f.tag()),
                us,
                2.0 * (n * k * rows) as f64,
            );
            if f == F::Bf16 {
                let us = run.time(1, |_| t.pack(&run.stream, x.ptr(), k, rows, k, packed.ptr(), true))?;
                run.timed("pack", format!("{rows}x{k}"), us, rows * k * 4);
            }
        }
    }
    let (e, h, i, top) = (512usize, 2560usize, 640usize, 10usize);
    let l = layer(run, e, h, i, false, 8)?;
    let perm = permutation(&mut run.rng, e);
    let mut tab = vec![0u64; 3 * e];
    tab[..e].copy_from_slice(&l.addresses);
    let up_tab = run.dev.upload(&tab)?;
    tab[..e].iter_mut().for_each(|a| *a += (2 * i / 16 * (h / 16) * 144) as u64);
    let down_tab = run.dev.upload(&tab)?;
    let up = ExpertPlanes {
        tab: up_tab.ptr(),
        experts: e,
        n: 2 * i,
        k: h,
        k_pad: h,
        alpha: l.table.alpha,
        ..ExpertPlanes::default()
    };
    let down = ExpertPlanes { tab: down_tab.ptr(), n: h, k: i, k_pad: i, down: true, ..up };
    for (rows, s) in [(2048usize, 0.5), (8192, 0.0), (8192, 1.2)] {
        let ids: Vec<i32> = (0..rows).flat_map(|_| zipf_ids(&mut run.rng, e, top, s, &perm)).collect();
        let picks = rows * top;
        let x = run.dev.upload(&run.rng.bf16(rows * h, 1.0))?;
        let (mid, y) = (run.dev.alloc(picks * i * 2)?, run.dev.alloc(picks * h * 2)?);
        for &wg in instances(run) {
            let c = route(run, e, top, ids.clone(), if wg { 128 } else { 64 })?;
            let sort = Sort::with_width(&run.dev, e, top, if wg { 128 } else { 64 })?;
            let dids = run.dev.upload(&ids)?;
            let t = Tile::with(&run.dev, TileFormat::Rg16, wg)?;
            let pu = run.dev.alloc(Tile::packed_bytes(c.places, h))?;
            let pd = run.dev.alloc(Tile::packed_bytes(c.places, i))?;
            let q = |down| Some(Quantise { input: l.table.input, divisor: false, down });
            let (st, o) = (&run.stream, c.sorted);
            let case = format!("{} 512 experts 2560/640, {rows} rows, Zipf {s}", label(wg));
            let us = run.time(1, |_| sort.launch(st, dids.ptr(), rows, o, true))?;
            run.timed("sort", case.clone(), us, picks * 12);
            let st = &run.stream;
            let us = run.time(1, |_| {
                t.pack_sorted(st, x.ptr(), h, h, o, top, c.max_jobs, q(false), pu.ptr(), true)
            })?;
            run.timed("pack W4A4", case.clone(), us, picks * h * 4);
            let st = &run.stream;
            let us =
                run.time(1, |_| t.grouped(st, &up, o, pu.ptr(), mid.ptr(), i, Epilogue::SwiGlu, true))?;
            run.timed_flops("tile experts gate/up", case.clone(), us, (4 * picks * h * i) as f64);
            let st = &run.stream;
            run.stream.synchronize()?;
            let up_down = run
                .time(1, |_| t.pack_sorted(st, mid.ptr(), i, i, o, 0, c.max_jobs, q(true), pd.ptr(), true))?;
            run.timed("pack W4A4 of h", case.clone(), up_down, picks * i * 4);
            let st = &run.stream;
            let us = run.time(1, |_| t.grouped(st, &down, o, pd.ptr(), y.ptr(), h, Epilogue::Rows, true))?;
            run.timed_flops("tile experts down", case.clone(), us, (2 * picks * h * i) as f64);
        }
    }
    Ok(())
}
