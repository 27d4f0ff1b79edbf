"""`torch.cuda.get_device_properties`: what is known of a simulated GPU."""

from simgpu._device.visible import uuid_of

_MOST_THREADS_PER_BLOCK = 1024  # of every card since 2010
_REGISTERS = 65536  # of a multiprocessor, of every card in the table
_SHARED_PER_BLOCK = 48 * 1024  # bytes; more must be asked for
_RESERVED = 1024  # bytes of shared memory that CUDA takes of each block, from 8.0 on


class DeviceProperties:
    """The properties of one GPU, under the names of PyTorch.

    Source: CUDA's programming guide, "Technical Specifications per Compute Capability",
    and the datasheets named in `_device/cards.py`.
    """

    def __init__(self, gpu):
        card = gpu.card
        self.name = f"{card.name} (simulated)"
        self.major, self.minor = card.capability
        self.total_memory = gpu.memory.total  # bytes
        self.multi_processor_count = card.multi_processors
        self.uuid = uuid_of(gpu.ordinal)
        self.pci_bus_id = gpu.ordinal
        self.pci_device_id = 0
        self.pci_domain_id = 0
        self.L2_cache_size = card.l2_cache  # bytes
        self.warp_size = 32
        self.is_integrated = 0
        self.is_multi_gpu_board = 0
        self.max_threads_per_multi_processor = card.threads_per_multi_processor
        self.max_threads_per_block = _MOST_THREADS_PER_BLOCK
        self.regs_per_multiprocessor = _REGISTERS
        self.shared_memory_per_block = _SHARED_PER_BLOCK
        reserved = _RESERVED if card.capability >= (8, 0) else 0
        self.shared_memory_per_block_optin = card.shared_memory - reserved
        self.shared_memory_per_multiprocessor = card.shared_memory
        self.clock_rate = card.clock  # kHz
        self.memory_clock_rate = card.memory_clock  # kHz
        self.memory_bus_width = card.memory_bus  # bits
        self.gcnArchName = card.name  # of AMD's cards; PyTorch has the name here

    def __eq__(self, other) -> bool:
        return isinstance(other, DeviceProperties) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash(self.uuid)

    def __repr__(self) -> str:
        return (
            f"_CudaDeviceProperties(name='{self.name}', major={self.major}, "
            f"minor={self.minor}, total_memory={self.total_memory // 2**20}MB, "
            f"multi_processor_count={self.multi_processor_count}, uuid={self.uuid}, "
            f"pci_bus_id={self.pci_bus_id}, "
            f"L2_cache_size={self.L2_cache_size // 2**20}MB)"
        )
