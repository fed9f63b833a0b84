//! A thin layer over the driver API: context, streams, events, modules, buffers, graphs, launches.
//!
//! Everything that touches the driver is here; the rest of the crate is safe code that names buffers. A
//! [`DeviceBuffer`] frees itself; kernels run asynchronously, so a buffer must outlive the stream's work, which
//! [`Stream::synchronize`] waits for. Dropping a buffer synchronizes its context first (`cuMemFree` does).

#![expect(unsafe_code, reason = "calls into the CUDA driver; each block states why it is sound")]

use crate::error::{CudaError, Result};
use crate::tape::Launch;
pub use crate::tape::Tape;
use cudarc::driver::sys;
use std::cell::RefCell;
use std::collections::{HashMap, HashSet};
use std::ffi::{CStr, c_void};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

fn check(call: &'static str, code: sys::CUresult) -> Result<()> {
    if code == sys::CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    let mut p = std::ptr::null();
    // SAFETY: p receives a pointer to a static string of the driver, or stays null.
    let name = unsafe {
        if sys::cuGetErrorName(code, &mut p) == sys::CUresult::CUDA_SUCCESS && !p.is_null() {
            CStr::from_ptr(p).to_string_lossy().into_owned()
        } else {
            "unknown error".into()
        }
    };
    Err(CudaError::Driver { call, name, code: code as u32 })
}

/// Facts about the device that kernels and plans need.
#[derive(Clone, Debug)]
pub struct DeviceInfo {
    /// Marketing name.
    pub name: String,
    /// Compute capability times ten: 90, 120.
    pub capability: i32,
    /// Multiprocessors.
    pub multiprocessors: u32,
    /// Bytes of shared memory one block may ask for.
    pub shared_per_block: usize,
    /// Bytes of the L2 cache.
    pub l2_bytes: usize,
    /// Driver version, 13000 = 13.0.
    pub driver: i32,
}

/// A device with its primary context and the embedded modules.
pub struct Device {
    info: DeviceInfo,
    context: sys::CUcontext,
    functions: HashMap<String, sys::CUfunction>,
    /// Dynamic shared memory each function was allowed, by address.
    shared: Mutex<HashMap<usize, usize>>,
    /// Functions launched since [`Device::note_launches`].
    launched: Mutex<HashSet<usize>>,
    noting: AtomicBool,
}

// SAFETY: driver handles may be used from any thread once the context is current there, which `bind` ensures.
unsafe impl Send for Device {}
// SAFETY: as above; the driver serialises calls on one context.
unsafe impl Sync for Device {}

/// True if the driver library can be loaded. Nothing else in this crate touches the driver before asking this.
pub fn driver_present() -> bool {
    // SAFETY: only tries to open the library.
    unsafe { sys::is_culib_present() }
}

impl Device {
    /// Opens device `ordinal` and loads the embedded kernels.
    pub fn open(ordinal: i32) -> Result<Arc<Device>> {
        if !driver_present() {
            return Err(CudaError::NoDriver("libcuda was not found"));
        }
        if crate::embedded_targets().is_empty() {
            return Err(CudaError::NoKernels);
        }
        // SAFETY: plain driver calls with valid out pointers; the image pointers are 'static embedded fatbins.
        unsafe {
            check("cuInit", sys::cuInit(0))?;
            let mut n = 0;
            check("cuDeviceGetCount", sys::cuDeviceGetCount(&mut n))?;
            if ordinal >= n {
                return Err(CudaError::NoDriver("no such device"));
            }
            let mut dev = 0;
            check("cuDeviceGet", sys::cuDeviceGet(&mut dev, ordinal))?;
            let attr = |a| -> Result<i32> {
                let mut v = 0;
                check("cuDeviceGetAttribute", sys::cuDeviceGetAttribute(&mut v, a, dev))?;
                Ok(v)
            };
            use sys::CUdevice_attribute as A;
            let mut raw = [0 as std::ffi::c_char; 256];
            check("cuDeviceGetName", sys::cuDeviceGetName(raw.as_mut_ptr(), 255, dev))?;
            let mut driver = 0;
            check("cuDriverGetVersion", sys::cuDriverGetVersion(&mut driver))?;
            let info = DeviceInfo {
                name: CStr::from_ptr(raw.as_ptr()).to_string_lossy().into_owned(),
                capability: attr(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)? * 10
                    + attr(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
                multiprocessors: attr(A::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)? as u32,
                shared_per_block: attr(A::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)? as usize,
                l2_bytes: attr(A::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)? as usize,
                driver,
            };
            let mut context = std::ptr::null_mut();
            check("cuDevicePrimaryCtxRetain", sys::cuDevicePrimaryCtxRetain(&mut context, dev))?;
            check("cuCtxSetCurrent", sys::cuCtxSetCurrent(context))?;
            let mut functions = HashMap::new();
            for (_, image) in crate::FATBINS {
                let mut m = std::ptr::null_mut();
                match sys::cuModuleLoadData(&mut m, image.as_ptr().cast()) {
                    sys::CUresult::CUDA_SUCCESS => {
                        // The list of entries spares lookups that fail, which memory checkers count as errors.
                        let mut n = 0;
                        check("cuModuleGetFunctionCount", sys::cuModuleGetFunctionCount(&mut n, m))?;
                        let mut list = vec![std::ptr::null_mut(); n as usize];
                        check(
                            "cuModuleEnumerateFunctions",
                            sys::cuModuleEnumerateFunctions(list.as_mut_ptr(), n, m),
                        )?;
                        for f in list {
                            let mut name = std::ptr::null();
                            check("cuFuncGetName", sys::cuFuncGetName(&mut name, f))?;
                            functions.insert(CStr::from_ptr(name).to_string_lossy().into_owned(), f);
                        }
                    }
                    // A file compiled for another family only (fp4 on sm_90) has no image here.
                    sys::CUresult::CUDA_ERROR_NO_BINARY_FOR_GPU => {}
                    code => check("cuModuleLoadData", code)?,
                }
            }
            if functions.is_empty() {
                let built = crate::embedded_targets().join(", ");
                return Err(CudaError::WrongTarget { device: info.name, have: info.capability, built });
            }
            Ok(Arc::new(Device {
                info,
                context,
                functions,
                shared: Mutex::default(),
                launched: Mutex::default(),
                noting: AtomicBool::new(false),
            }))
        }
    }

    /// Facts about the device.
    pub fn info(&self) -> &DeviceInfo {
        &self.info
    }

    /// Makes the context current on this thread.
    pub fn bind(&self) -> Result<()> {
        // SAFETY: the context lives as long as self.
        check("cuCtxSetCurrent", unsafe { sys::cuCtxSetCurrent(self.context) })
    }

    /// Free and total bytes of device memory.
    pub fn memory(&self) -> Result<(usize, usize)> {
        let (mut free, mut total) = (0, 0);
        // SAFETY: valid out pointers.
        check("cuMemGetInfo", unsafe { sys::cuMemGetInfo_v2(&mut free, &mut total) })?;
        Ok((free, total))
    }

    /// Allocates `bytes` and fills them with 0xFF: a NaN in every float format, so unwritten outputs show.
    pub fn alloc(self: &Arc<Self>, bytes: usize) -> Result<DeviceBuffer> {
        let mut ptr = 0;
        let len = bytes.max(1);
        // A kernel may read whole 16-row tiles of a plane whose last tile is partial: every buffer is padded.
        let padded = len.div_ceil(256) * 256 + PAD;
        // SAFETY: valid out pointer; the memory is owned by the buffer.
        unsafe {
            check("cuMemAlloc", sys::cuMemAlloc_v2(&mut ptr, padded))?;
            check("cuMemsetD8", sys::cuMemsetD8_v2(ptr, 0xFF, padded))?;
            // The fill is asynchronous and in no order with streams: one that ran late would erase what a kernel wrote.
            check("cuStreamSynchronize", sys::cuStreamSynchronize(std::ptr::null_mut()))?;
        }
        Ok(DeviceBuffer { device: self.clone(), ptr, bytes: len, owner: None })
    }

    /// Allocates and copies.
    pub fn upload<T: Plain>(self: &Arc<Self>, data: &[T]) -> Result<DeviceBuffer> {
        let b = self.alloc(std::mem::size_of_val(data))?;
        b.write(0, data)?;
        Ok(b)
    }

    /// A new stream.
    pub fn stream(self: &Arc<Self>) -> Result<Stream> {
        let mut raw = std::ptr::null_mut();
        // SAFETY: valid out pointer.
        check("cuStreamCreate", unsafe { sys::cuStreamCreate(&mut raw, 1) })?;
        Ok(Stream { device: self.clone(), raw, tape: RefCell::new(None) })
    }

    /// A new event that records times.
    pub fn event(self: &Arc<Self>) -> Result<Event> {
        let mut raw = std::ptr::null_mut();
        // SAFETY: valid out pointer.
        check("cuEventCreate", unsafe { sys::cuEventCreate(&mut raw, 0) })?;
        Ok(Event { _device: self.clone(), raw })
    }

    /// Page-locked host memory, mapped for the device.
    pub fn pinned(self: &Arc<Self>, bytes: usize) -> Result<PinnedBuffer> {
        let mut p = std::ptr::null_mut();
        // SAFETY: valid out pointer. Flags: portable | mapped.
        check("cuMemHostAlloc", unsafe { sys::cuMemHostAlloc(&mut p, bytes.max(1), 3) })?;
        Ok(PinnedBuffer { _device: self.clone(), ptr: p.cast(), bytes })
    }

    /// Page-locks memory that stays where it is. The device reads it at the same address.
    pub fn register(self: &Arc<Self>, memory: Arc<dyn AsRef<[u8]> + Send + Sync>) -> Result<Registered> {
        let bytes = (*memory).as_ref();
        let p = bytes.as_ptr().cast_mut().cast::<c_void>();
        // SAFETY: the range is live as long as the guard holds `memory`. Flags: portable | mapped.
        check("cuMemHostRegister", unsafe { sys::cuMemHostRegister_v2(p, bytes.len(), 3) })?;
        Ok(Registered { _device: self.clone(), memory })
    }

    /// A kernel by name, allowed to use `shared` bytes of dynamic shared memory.
    pub fn kernel(self: &Arc<Self>, name: &str, shared: usize) -> Result<Kernel> {
        let Some(&f) = self.functions.get(name) else { return Err(CudaError::NoKernel(name.into())) };
        if shared > 48 << 10 {
            // The allowance belongs to the function: a smaller plan of another caller must not take it away.
            let mut allowed = self.shared.lock().unwrap_or_else(|e| e.into_inner());
            let have = allowed.entry(f as usize).or_default();
            if shared > *have {
                let a = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
                // SAFETY: f is a function of a loaded module.
                check("cuFuncSetAttribute", unsafe { sys::cuFuncSetAttribute(f, a, shared as i32) })?;
                *have = shared;
            }
        }
        Ok(Kernel { _device: self.clone(), raw: f, shared: shared as u32 })
    }

    /// From now on launches are noted for [`Device::not_launched`].
    pub fn note_launches(&self) {
        self.noting.store(true, Ordering::Relaxed);
    }

    /// Names of the loaded kernels that no launch since [`Device::note_launches`] named, in order.
    pub fn not_launched(&self) -> Vec<String> {
        let seen = self.launched.lock().unwrap_or_else(|e| e.into_inner());
        let rest = self.functions.iter().filter(|(_, f)| !seen.contains(&(**f as usize)));
        let mut names: Vec<String> = rest.map(|(n, _)| n.clone()).collect();
        names.sort();
        names
    }

    /// Name of a function of the loaded modules.
    pub(crate) fn name_of(&self, function: usize) -> &str {
        self.functions.iter().find(|(_, f)| **f as usize == function).map_or("", |(n, _)| n)
    }

    /// Waits for all work of the context.
    pub fn synchronize(&self) -> Result<()> {
        // SAFETY: no arguments.
        check("cuCtxSynchronize", unsafe { sys::cuCtxSynchronize() })
    }
}

/// Bytes past the end of every buffer that a kernel may read (never write).
pub const PAD: usize = 64 << 10;

/// Element types that may be copied to and from a device.
///
/// # Safety
/// Any bit pattern must be a valid value and the type must have no padding.
pub unsafe trait Plain: Copy + Default {}
macro_rules! plain { ($($t:ty),*) => { $(
    // SAFETY: primitive integers and floats.
    unsafe impl Plain for $t {}
)* } }
plain!(u8, i8, u16, i16, u32, i32, u64, i64, f32, f64);

/// Owned device memory.
pub struct DeviceBuffer {
    device: Arc<Device>,
    ptr: u64,
    bytes: usize,
    /// The allocation that a part belongs to; `None` owns its memory.
    owner: Option<Arc<DeviceBuffer>>,
}

impl DeviceBuffer {
    /// `bytes` bytes of a larger allocation from byte `offset` on, which lives as long as the part does. What follows
    /// the part in the allocation takes the place of the padding.
    pub fn part(whole: &Arc<DeviceBuffer>, offset: usize, bytes: usize) -> Result<DeviceBuffer> {
        if offset + bytes > whole.bytes {
            let what = format!("{bytes} bytes at {offset} of {}", whole.bytes);
            return Err(CudaError::Shape { kernel: "part", what });
        }
        let (device, ptr) = (whole.device.clone(), whole.ptr + offset as u64);
        Ok(DeviceBuffer { device, ptr, bytes, owner: Some(whole.clone()) })
    }

    /// Address on the device.
    pub fn ptr(&self) -> u64 {
        self.ptr
    }

    /// Address `offset` bytes in.
    pub fn at(&self, offset: usize) -> u64 {
        debug_assert!(offset <= self.bytes + PAD);
        self.ptr + offset as u64
    }

    /// Length as asked for.
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// True if it holds nothing.
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// Copies `data` to byte `offset`, synchronously.
    pub fn write<T: Plain>(&self, offset: usize, data: &[T]) -> Result<()> {
        let n = std::mem::size_of_val(data);
        if offset + n > self.bytes {
            return Err(CudaError::Shape {
                kernel: "copy",
                what: format!("{n} bytes at {offset} in {}", self.bytes),
            });
        }
        // SAFETY: the destination range was checked; the source is a live slice of plain values.
        check("cuMemcpyHtoD", unsafe {
            sys::cuMemcpyHtoD_v2(self.ptr + offset as u64, data.as_ptr().cast(), n)
        })?;
        // From pageable memory the call may return before the last part has arrived.
        // SAFETY: the null stream is that of the context.
        check("cuStreamSynchronize", unsafe { sys::cuStreamSynchronize(std::ptr::null_mut()) })
    }

    /// Copies `n` elements from byte `offset`, synchronously.
    pub fn read<T: Plain>(&self, offset: usize, n: usize) -> Result<Vec<T>> {
        let mut v = vec![T::default(); n];
        let bytes = n * size_of::<T>();
        if offset + bytes > self.bytes {
            return Err(CudaError::Shape {
                kernel: "copy",
                what: format!("{bytes} bytes at {offset} in {}", self.bytes),
            });
        }
        // SAFETY: the source range was checked; any bits are a valid T.
        check("cuMemcpyDtoH", unsafe {
            sys::cuMemcpyDtoH_v2(v.as_mut_ptr().cast(), self.ptr + offset as u64, bytes)
        })?;
        Ok(v)
    }

    /// Fills with one byte.
    pub fn fill(&self, byte: u8) -> Result<()> {
        // SAFETY: the range is the buffer itself.
        check("cuMemsetD8", unsafe { sys::cuMemsetD8_v2(self.ptr, byte, self.bytes) })
    }

    /// The device it lives on.
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }
}

impl Drop for DeviceBuffer {
    fn drop(&mut self) {
        if self.owner.is_some() {
            return;
        }
        // SAFETY: allocated by cuMemAlloc and freed once; the call waits for work that uses it. An error can only
        // mean that the context is already lost.
        let _ = unsafe { sys::cuMemFree_v2(self.ptr) };
    }
}

/// Page-locked host memory, readable by the device at the same address.
pub struct PinnedBuffer {
    _device: Arc<Device>,
    ptr: *mut u8,
    bytes: usize,
}

// SAFETY: plain memory.
unsafe impl Send for PinnedBuffer {}
// SAFETY: shared access reads only.
unsafe impl Sync for PinnedBuffer {}

impl PinnedBuffer {
    /// The bytes.
    pub fn as_slice(&self) -> &[u8] {
        // SAFETY: ptr/bytes describe the allocation.
        unsafe { std::slice::from_raw_parts(self.ptr, self.bytes) }
    }
    /// The bytes, to write. The device must not read them at the same time.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: ptr/bytes describe the allocation, borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.ptr, self.bytes) }
    }
    /// Address for kernels (unified addressing: the same as the host's).
    pub fn device_ptr(&self) -> u64 {
        self.ptr as u64
    }
}

impl AsRef<[AtomicU32]> for PinnedBuffer {
    /// The words as both sides see them at any time. Kernels must write whole aligned words.
    fn as_ref(&self) -> &[AtomicU32] {
        // SAFETY: ptr/bytes describe the allocation, page-aligned; an atomic is laid out as its integer.
        unsafe { std::slice::from_raw_parts(self.ptr.cast(), self.bytes / 4) }
    }
}

impl Drop for PinnedBuffer {
    fn drop(&mut self) {
        // SAFETY: allocated by cuMemHostAlloc and freed once.
        let _ = unsafe { sys::cuMemFreeHost(self.ptr.cast()) };
    }
}

/// Page-locked memory of someone else's, see [`Device::register`].
pub struct Registered {
    _device: Arc<Device>,
    memory: Arc<dyn AsRef<[u8]> + Send + Sync>,
}

impl Registered {
    /// Address for kernels and copies.
    pub fn device_ptr(&self) -> u64 {
        (*self.memory).as_ref().as_ptr() as u64
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        // SAFETY: registered once, released once.
        let _ = unsafe { sys::cuMemHostUnregister((*self.memory).as_ref().as_ptr().cast_mut().cast()) };
    }
}

/// An event with a time stamp.
pub struct Event {
    _device: Arc<Device>,
    raw: sys::CUevent,
}

// SAFETY: a handle, used from one thread at a time.
unsafe impl Send for Event {}

impl Event {
    /// Waits for it; at once if it was never recorded.
    pub fn wait(&self) -> Result<()> {
        // SAFETY: live event.
        check("cuEventSynchronize", unsafe { sys::cuEventSynchronize(self.raw) })
    }

    /// Whether everything before it has been done.
    pub fn is_done(&self) -> Result<bool> {
        // SAFETY: live event.
        match unsafe { sys::cuEventQuery(self.raw) } {
            sys::CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            code => check("cuEventQuery", code).map(|()| true),
        }
    }

    /// Microseconds from `start` to `self`; waits for both.
    pub fn micros_since(&self, start: &Event) -> Result<f64> {
        let mut ms = 0f32;
        // SAFETY: both events are live and were recorded.
        unsafe {
            check("cuEventSynchronize", sys::cuEventSynchronize(self.raw))?;
            check("cuEventElapsedTime", sys::cuEventElapsedTime_v2(&mut ms, start.raw, self.raw))?;
        }
        Ok(f64::from(ms) * 1e3)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: created once, destroyed once.
        let _ = unsafe { sys::cuEventDestroy_v2(self.raw) };
    }
}

/// A stream of device work.
pub struct Stream {
    device: Arc<Device>,
    raw: sys::CUstream,
    tape: RefCell<Option<Tape>>,
}

// SAFETY: a handle and plain data, used from one thread at a time.
unsafe impl Send for Stream {}

impl Stream {
    /// The device.
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// Waits for everything enqueued and reports a fault of any kernel.
    pub fn synchronize(&self) -> Result<()> {
        // SAFETY: live stream.
        check("cuStreamSynchronize", unsafe { sys::cuStreamSynchronize(self.raw) })
    }

    /// Records `event` after the work enqueued so far.
    pub fn record(&self, event: &Event) -> Result<()> {
        // SAFETY: live handles.
        check("cuEventRecord", unsafe { sys::cuEventRecord(event.raw, self.raw) })
    }

    /// Fills `bytes` at `ptr` with a byte value, in stream order.
    pub fn fill(&self, buffer: &DeviceBuffer, byte: u8) -> Result<()> {
        // SAFETY: the range is the buffer.
        check("cuMemsetD8Async", unsafe { sys::cuMemsetD8Async(buffer.ptr, byte, buffer.bytes, self.raw) })
    }

    /// Launches a kernel. `pdl` lets it start before its predecessor has finished: every kernel of this crate
    /// executes `griddepcontrol.wait` before it reads what an earlier kernel wrote.
    pub fn launch(&self, k: &Kernel, grid: [u32; 3], block: u32, pdl: bool, args: &Args) -> Result<()> {
        if let Some(tape) = &mut *self.tape.borrow_mut() {
            let first = tape.words.len();
            tape.words.extend_from_slice(&args.words);
            let (function, n, starts) = (k.raw as usize, args.words.len(), args.starts);
            tape.launches.push(Launch { function, shared: k.shared, grid, block, pdl, first, n, starts });
            return Ok(());
        }
        self.enqueue(k.raw, k.shared, grid, block, pdl, &args.words, args.starts)
    }

    #[expect(clippy::too_many_arguments, reason = "one launch")]
    fn enqueue(
        &self,
        function: sys::CUfunction,
        shared: u32,
        grid: [u32; 3],
        block: u32,
        pdl: bool,
        words: &[u64],
        starts: u128,
    ) -> Result<()> {
        if self.device.noting.load(Ordering::Relaxed) {
            self.device.launched.lock().unwrap_or_else(|e| e.into_inner()).insert(function as usize);
        }
        let mut attr = sys::CUlaunchAttribute_st {
            id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
            pad: [0; 4],
            value: sys::CUlaunchAttributeValue_union { pad: [0; 64] },
        };
        attr.value.programmaticStreamSerializationAllowed = 1;
        let cfg = sys::CUlaunchConfig_st {
            gridDimX: grid[0],
            gridDimY: grid[1],
            gridDimZ: grid[2],
            blockDimX: block,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: shared,
            hStream: self.raw,
            attrs: &mut attr,
            numAttrs: u32::from(pdl),
        };
        let mut pointers = [std::ptr::null_mut::<c_void>(); Args::MOST];
        let begins = words.iter().enumerate().filter(|(i, _)| starts >> i & 1 == 1);
        for (p, (_, w)) in pointers.iter_mut().zip(begins) {
            *p = std::ptr::from_ref(w).cast_mut().cast();
        }
        // SAFETY: each argument's words are at least as large as the parameter they stand for (little-endian, so
        // smaller parameters read the low bytes of one). The wrappers in `kernels` pass what each kernel declares.
        check("cuLaunchKernelEx", unsafe {
            sys::cuLaunchKernelEx(&cfg, function, pointers.as_mut_ptr(), std::ptr::null_mut())
        })
    }

    /// From now on launches are noted instead of made.
    pub fn hold(&self) {
        self.tape.borrow_mut().get_or_insert_default();
    }

    /// What was noted since [`Stream::hold`]; launches are made again from now on.
    pub fn release(&self) -> Tape {
        self.tape.borrow_mut().take().unwrap_or_default()
    }

    /// Launches noted since [`Stream::hold`].
    pub fn held(&self) -> usize {
        self.tape.borrow().as_ref().map_or(0, Tape::len)
    }

    /// Makes the launches of a tape.
    pub fn play(&self, tape: &Tape) -> Result<()> {
        self.play_part(tape, 0..tape.len())
    }

    /// Makes some launches of a tape.
    pub fn play_part(&self, tape: &Tape, part: std::ops::Range<usize>) -> Result<()> {
        for l in tape.launches.get(part).unwrap_or_default() {
            let words = &tape.words[l.first..l.first + l.n];
            // The function was a kernel of this device when it was noted.
            self.enqueue(l.function as sys::CUfunction, l.shared, l.grid, l.block, l.pdl, words, l.starts)?;
        }
        Ok(())
    }

    /// Copies between device memory and page-locked memory or within either, in stream order. The caller keeps both
    /// ranges alive and, on the host, untouched until the stream has passed.
    pub fn copy(&self, to: u64, from: u64, bytes: usize) -> Result<()> {
        // SAFETY: addresses of live ranges by the caller's promise; unified addressing finds the direction.
        check("cuMemcpyAsync", unsafe { sys::cuMemcpyAsync(to, from, bytes, self.raw) })
    }

    /// Sets a range of device memory to zero, in stream order.
    pub fn zero(&self, at: u64, bytes: usize) -> Result<()> {
        // SAFETY: a live range by the caller's promise.
        check("cuMemsetD8Async", unsafe { sys::cuMemsetD8Async(at, 0, bytes, self.raw) })
    }

    /// Waits for the stream, then copies `n` values from device address `from`.
    pub fn read<T: Plain>(&self, from: u64, n: usize) -> Result<Vec<T>> {
        self.synchronize()?;
        let mut v = vec![T::default(); n];
        // SAFETY: a live range by the caller's promise; any bits are a valid T.
        check("cuMemcpyDtoH", unsafe {
            sys::cuMemcpyDtoH_v2(v.as_mut_ptr().cast(), from, n * size_of::<T>())
        })?;
        Ok(v)
    }

    /// Waits for the stream, then copies values to device address `to`.
    pub fn write<T: Plain>(&self, to: u64, values: &[T]) -> Result<()> {
        self.synchronize()?;
        // SAFETY: a live range by the caller's promise.
        check("cuMemcpyHtoD", unsafe {
            sys::cuMemcpyHtoD_v2(to, values.as_ptr().cast(), std::mem::size_of_val(values))
        })
    }

    /// Work enqueued from now on waits for `event`.
    pub fn wait(&self, event: &Event) -> Result<()> {
        // SAFETY: live handles.
        check("cuStreamWaitEvent", unsafe { sys::cuStreamWaitEvent(self.raw, event.raw, 0) })
    }

    /// Records the launches made by `body` as a graph.
    pub fn capture(&self, body: impl FnOnce() -> Result<()>) -> Result<Graph> {
        // SAFETY: live stream; capture is ended below whatever the body returns.
        unsafe {
            let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
            check("cuStreamBeginCapture", sys::cuStreamBeginCapture_v2(self.raw, mode))?;
            let done = body();
            let mut graph = std::ptr::null_mut();
            let ended = check("cuStreamEndCapture", sys::cuStreamEndCapture(self.raw, &mut graph));
            done?;
            ended?;
            let mut exec = std::ptr::null_mut();
            let made = check("cuGraphInstantiate", sys::cuGraphInstantiateWithFlags(&mut exec, graph, 0));
            sys::cuGraphDestroy(graph);
            made?;
            Ok(Graph { _device: self.device.clone(), raw: exec })
        }
    }

    /// Replays a graph.
    pub fn replay(&self, graph: &Graph) -> Result<()> {
        // SAFETY: live handles.
        check("cuGraphLaunch", unsafe { sys::cuGraphLaunch(graph.raw, self.raw) })
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // SAFETY: created once, destroyed once.
        let _ = unsafe { sys::cuStreamDestroy_v2(self.raw) };
    }
}

/// An executable graph of launches.
pub struct Graph {
    _device: Arc<Device>,
    raw: sys::CUgraphExec,
}

// SAFETY: a handle, used from one thread at a time.
unsafe impl Send for Graph {}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: instantiated once, destroyed once.
        let _ = unsafe { sys::cuGraphExecDestroy(self.raw) };
    }
}

/// A function of an embedded module with its dynamic shared memory.
#[derive(Clone)]
pub struct Kernel {
    _device: Arc<Device>,
    raw: sys::CUfunction,
    shared: u32,
}

// SAFETY: a handle, valid while the device lives.
unsafe impl Send for Kernel {}
// SAFETY: as above.
unsafe impl Sync for Kernel {}

/// Kernel arguments: words of 8 bytes, a parameter each, or blocks of several words that are one parameter (a structure).
#[derive(Clone, Debug, Default)]
pub struct Args {
    words: Vec<u64>,
    /// Bit i: word i begins a parameter.
    starts: u128,
}

impl Args {
    /// More words than any kernel here takes.
    const MOST: usize = 128;

    /// None yet.
    pub fn new() -> Self {
        Args { words: Vec::with_capacity(32), starts: 0 }
    }
    fn push(mut self, word: u64) -> Self {
        // No kernel has more: a longer list is a mistake in a wrapper, which its self-test shows.
        debug_assert!(self.words.len() < Self::MOST);
        self.starts |= 1 << self.words.len();
        self.words.push(word);
        self
    }
    /// A structure of whole words.
    pub fn block(mut self, words: &[u64]) -> Self {
        debug_assert!(self.words.len() + words.len() <= Self::MOST);
        self.starts |= 1 << self.words.len();
        self.words.extend_from_slice(words);
        self
    }
    /// A device address (or 0).
    pub fn ptr(self, p: u64) -> Self {
        self.push(p)
    }
    /// A 32-bit integer parameter.
    pub fn int(self, v: usize) -> Self {
        self.push(v as u64)
    }
    /// Several 32-bit integer parameters.
    pub fn ints(self, v: &[usize]) -> Self {
        v.iter().fold(self, |a, v| a.int(*v))
    }
    /// A float parameter.
    pub fn f32(self, v: f32) -> Self {
        self.push(u64::from(v.to_bits()))
    }
}
