"""The few calls of the CUDA driver that the checks need: modules, launches, memory."""

import ctypes as C

import numpy as np

_cuda = C.CDLL("libcuda.so.1")


def _check(code):
    if code:
        name = C.c_char_p()
        _cuda.cuGetErrorName(code, C.byref(name))
        raise RuntimeError(f"CUDA error {code}: {name.value}")


def start():
    """Takes the primary context of device 0, which PyTorch shares."""
    device, context = C.c_int(), C.c_void_p()
    _check(_cuda.cuInit(0))
    _check(_cuda.cuDeviceGet(C.byref(device), 0))
    _check(_cuda.cuDevicePrimaryCtxRetain(C.byref(context), device))
    _check(_cuda.cuCtxSetCurrent(context))


class Module:
    def __init__(self, image: bytes):
        self._image = image + b"\0"
        self._module = C.c_void_p()
        self._functions = {}
        _check(_cuda.cuModuleLoadData(C.byref(self._module), self._image))

    def function(self, name):
        """The kernel, allowed all the shared memory that a block can have."""
        if name not in self._functions:
            function, static, most = C.c_void_p(), C.c_int(), C.c_int()
            _check(_cuda.cuModuleGetFunction(C.byref(function), self._module, name.encode()))
            _check(_cuda.cuFuncGetAttribute(C.byref(static), 1, function))
            _check(_cuda.cuDeviceGetAttribute(C.byref(most), 97, 0))
            _check(_cuda.cuFuncSetAttribute(function, 8, most.value - static.value))
            self._functions[name] = function
        return self._functions[name]


def launch(function, grid, threads, shared_bytes, arguments, stream=0):
    """`arguments`: addresses as int, parameter structs as bytes."""
    held = [C.c_void_p(a) if isinstance(a, int) else (C.c_char * len(a)).from_buffer_copy(a) for a in arguments]
    pointers = (C.c_void_p * len(held))(*[C.addressof(h) for h in held])
    _check(_cuda.cuLaunchKernel(function, *grid, threads, 1, 1, shared_bytes, C.c_void_p(stream), pointers, None))


def synchronize():
    _check(_cuda.cuCtxSynchronize())


class Buffer:
    """Device memory. Not initialised, unless `poison`: then every byte is 0xff, which is NaN in every float type."""

    def __init__(self, content, poison=False):
        size = content if isinstance(content, int) else content.nbytes
        self.size = size
        self._address = C.c_uint64()
        _check(_cuda.cuMemAlloc_v2(C.byref(self._address), C.c_size_t(max(size, 16))))
        if not isinstance(content, int):
            content = np.ascontiguousarray(content)
            _check(_cuda.cuMemcpyHtoD_v2(self._address, content.ctypes.data_as(C.c_void_p), C.c_size_t(size)))
        elif poison:
            _check(_cuda.cuMemsetD8_v2(self._address, C.c_ubyte(0xFF), C.c_size_t(size)))

    @property
    def address(self):
        return self._address.value

    def bytes(self):
        out = np.empty(self.size, dtype=np.uint8)
        _check(_cuda.cuMemcpyDtoH_v2(out.ctypes.data_as(C.c_void_p), self._address, C.c_size_t(self.size)))
        return out

    def free(self):
        _check(_cuda.cuMemFree_v2(self._address))
