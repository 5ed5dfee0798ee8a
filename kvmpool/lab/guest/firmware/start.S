/* From the reset vector to main() in 32-bit flat mode. The ROM is mapped at 0xffff0000; RAM below 1 MiB holds the stack. */
    .section .reset, "ax"
    .code16
    /* The first instruction, at ip 0xfff0 of the segment that starts at 0xffff0000: jump to ip 0 (the offset wraps) */
    .byte 0xe9
    .word 0x10000 - (0xfff0 + 3)

    .section .start, "ax"
    .code16
    cli
    movl $gdt_pointer, %esi
    lgdtl %cs:(%si)
    movl %cr0, %eax
    orb $1, %al
    movl %eax, %cr0
    ljmpl $0x08, $flat

    .code32
flat:
    movw $0x10, %ax
    movw %ax, %ds
    movw %ax, %es
    movw %ax, %ss
    movl $0x80000, %esp
    call main
halt:
    hlt
    jmp halt

    .globl timer_interrupt
timer_interrupt:        /* acknowledge; hlt in main() returns */
    pushl %eax
    movb $0x20, %al
    outb %al, $0x20
    popl %eax
    iret

    .align 8
gdt:
    .quad 0
    .quad 0x00cf9a000000ffff    /* code, 4 GiB */
    .quad 0x00cf92000000ffff    /* data, 4 GiB */
gdt_pointer:
    .word gdt_pointer - gdt - 1
    .long gdt

    .section .note.GNU-stack, "", @progbits
